//! PowerSGD: the gradient of a matrix as a product of two thin ones.
//!
//! One step of power iteration per gradient, which starts from the result of the last one: `P = M Q`, summed over ranks
//! and orthogonalized, then `Q = Mᵀ P`, summed. All ranks then have the sum `P Qᵀ`, and what of the own gradient is missing
//! in it is added to the next.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tch::{Kind, Tensor};
use trainyard_cost::Volume;
use trainyard_torch::{Group, ReduceOp, Result, Work, meta};
use trainyard_trace::Purpose;

use super::error_feedback::{corrected, keep};
use super::hook::{GradientBucket, GradientHook, Reduction, all_reduce_volume, summed_as};
use super::plain::PlainReduction;
use crate::lock::lock;

/// Options of [`PowerSgd`]. The defaults are those of PyTorch's hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PowerSgdOptions {
    /// The rank of the approximation.
    pub rank: usize,
    /// Before this step, gradients are all-reduced as they are.
    pub start_step: u64,
    /// How many times fewer numbers a matrix must have to be compressed.
    pub min_compression_rate: usize,
}

impl Default for PowerSgdOptions {
    fn default() -> PowerSgdOptions {
        PowerSgdOptions {
            rank: 1,
            start_step: 1000,
            min_compression_rate: 2,
        }
    }
}

/// Low-rank compression of matrices with error feedback and warm start. Vectors, and matrices that would not shrink, are
/// all-reduced as they are.
#[derive(Debug)]
pub struct PowerSgd {
    options: PowerSgdOptions,
    bases: Bases,
}

/// The last `Q` of every matrix, from which the next step starts.
type Bases = Arc<Mutex<BTreeMap<MatrixId, Tensor>>>;

/// A matrix: the group that reduces it, its bucket, and its number in the bucket.
type MatrixId = (String, usize, usize);

impl PowerSgd {
    /// Reduces with these options.
    pub fn new(options: PowerSgdOptions) -> PowerSgd {
        PowerSgd {
            options,
            bases: Arc::default(),
        }
    }

    fn rank(&self) -> i64 {
        self.options.rank.max(1) as i64
    }

    /// The rows and columns of a gradient as a matrix, if it is compressed.
    fn matrix_shape(&self, gradient: &Tensor) -> Option<(i64, i64)> {
        let shape = gradient.size();
        let (&rows, rest) = shape.split_first()?;
        let columns: i64 = rest.iter().product();
        let compressed = self.rank() * (rows + columns);
        let rate = self.options.min_compression_rate as i64;
        (!rest.is_empty() && rate * compressed <= rows * columns).then_some((rows, columns))
    }

    /// The product of a member with its basis; `None` if the member is not compressed.
    fn approximate(
        &self,
        group: &Group,
        bucket: &GradientBucket<'_>,
        member: usize,
    ) -> Result<Option<Approximation>> {
        let target = bucket.members[member];
        let Some((rows, columns)) = self.matrix_shape(target) else {
            return Ok(None);
        };
        let error = bucket.error_of(member)?;
        let matrix = corrected(target, error.as_ref())?.f_reshape([rows, columns])?;
        let id = (group.name().to_owned(), bucket.index, member);
        let last = lock(&self.bases).get(&id).map(Tensor::shallow_clone);
        let basis = match last {
            Some(basis) => basis,
            None => first_basis(&matrix, columns, self.rank())?,
        };
        Ok(Some(Approximation {
            id,
            left: matrix.f_matmul(&basis)?,
            matrix,
            error,
            target: target.shallow_clone(),
        }))
    }
}

/// The basis from which the next step starts: the last one, unless it is zero or not finite, as after a step without
/// gradients or with gradients that are not finite. The host reads no value.
fn next_basis(last: &Tensor) -> Result<Tensor> {
    let (columns, rank) = last.size2()?;
    let square = last.f_mul(last)?.f_sum(Kind::Float)?;
    let holds = |condition: Tensor| condition.f_to_kind(Kind::Float);
    let is_usable = holds(square.f_gt(0.0)?)?.f_mul(&holds(square.f_lt(f64::INFINITY)?)?)?;
    let first = first_basis(last, columns, rank)?;
    let last = last.f_nan_to_num(0.0, 0.0, 0.0)?;
    Ok(first.f_add(&last.f_sub(&first)?.f_mul(&is_usable)?)?)
}

/// A fixed basis of full rank, the same on all ranks.
fn first_basis(like: &Tensor, columns: i64, rank: i64) -> Result<Tensor> {
    let numbers = meta::new_zeros(like, &[columns * rank])?.f_add_scalar(1.0)?;
    // Multiples of an irrational angle repeat no row.
    let angles = numbers.f_cumsum(0, Kind::Float)?.f_mul_scalar(2.399_963)?;
    Ok(angles.f_cos()?.f_view([columns, rank])?)
}

/// A matrix whose product with its basis is being summed.
struct Approximation {
    id: MatrixId,
    /// The gradient, with the error of earlier steps.
    matrix: Tensor,
    left: Tensor,
    error: Option<Tensor>,
    target: Tensor,
}

impl Approximation {
    /// Writes the sum of all ranks to the gradient, and keeps what it misses of the own one.
    fn finish(self, left: &Tensor, right: &Tensor, op: ReduceOp, num_ranks: usize) -> Result<()> {
        let sum = left.f_matmul(&right.f_transpose(0, 1)?)?;
        let mean = sum.f_div_scalar(num_ranks as f64)?;
        keep(self.error.as_ref(), &self.matrix, &mean)?;
        let mut target = self.target;
        let reduced = summed_as(sum, op, num_ranks)?;
        tch::no_grad(|| target.f_copy_(&reduced.f_view(target.size().as_slice())?))?;
        Ok(())
    }
}

/// Several tensors in one all-reduce.
struct Packed {
    work: Work,
    buffer: Tensor,
}

impl Packed {
    /// Starts to reduce tensors; `None` if there are none.
    fn start(
        group: &Group,
        tensors: &[&Tensor],
        op: ReduceOp,
        purpose: Purpose,
    ) -> Result<Option<Packed>> {
        if tensors.is_empty() {
            return Ok(None);
        }
        let flat = tensors.iter().map(|tensor| tensor.f_reshape(-1i64));
        let flat = flat.collect::<std::result::Result<Vec<_>, _>>()?;
        let buffer = Tensor::f_cat(&flat, 0)?;
        Ok(Some(Packed {
            work: group.all_reduce(&buffer, op, purpose)?,
            buffer,
        }))
    }

    /// The reduced tensors, in the shapes of `like`.
    fn finish(self, like: &[&Tensor]) -> Result<Vec<Tensor>> {
        self.work.wait()?;
        let lengths: Vec<i64> = like.iter().map(|tensor| tensor.numel() as i64).collect();
        let parts = self.buffer.f_split_with_sizes(lengths, 0)?;
        let shaped = parts.iter().zip(like);
        let shaped = shaped.map(|(part, like)| part.f_view(like.size().as_slice()));
        Ok(shaped.collect::<std::result::Result<_, _>>()?)
    }
}

struct InFlight {
    bases: Bases,
    group: Group,
    op: ReduceOp,
    purpose: Purpose,
    approximations: Vec<Approximation>,
    left_sum: Option<Packed>,
    plain: Vec<Tensor>,
    plain_sum: Option<Packed>,
}

impl GradientHook for PowerSgd {
    fn reduce(
        &self,
        group: &Group,
        bucket: &GradientBucket<'_>,
        op: ReduceOp,
    ) -> Result<Box<dyn Reduction>> {
        if bucket.step < self.options.start_step {
            return PlainReduction.reduce(group, bucket, op);
        }
        let (mut approximations, mut plain) = (Vec::new(), Vec::new());
        for (member, gradient) in bucket.members.iter().enumerate() {
            match self.approximate(group, bucket, member)? {
                Some(approximation) => approximations.push(approximation),
                None => plain.push(gradient.shallow_clone()),
            }
        }
        let lefts: Vec<&Tensor> = approximations.iter().map(|a| &a.left).collect();
        let plains: Vec<&Tensor> = plain.iter().collect();
        Ok(Box::new(InFlight {
            left_sum: Packed::start(group, &lefts, ReduceOp::Sum, bucket.purpose)?,
            plain_sum: Packed::start(group, &plains, op, bucket.purpose)?,
            bases: Arc::clone(&self.bases),
            group: group.clone(),
            op,
            purpose: bucket.purpose,
            approximations,
            plain,
        }))
    }

    fn volume(&self, bucket: &GradientBucket<'_>, num_ranks: usize) -> Volume {
        let of_member = |gradient: &&Tensor| match self.matrix_shape(gradient) {
            Some((rows, columns)) => {
                let length = (self.rank() * (rows + columns)) as usize;
                all_reduce_volume(length, Kind::Float, num_ranks)
            }
            None => all_reduce_volume(gradient.numel(), gradient.kind(), num_ranks),
        };
        bucket.members.iter().map(of_member).sum()
    }

    fn keeps_errors(&self) -> bool {
        true
    }
}

impl Reduction for InFlight {
    fn finish(self: Box<Self>) -> Result<()> {
        if let Some(sum) = self.plain_sum {
            let like: Vec<&Tensor> = self.plain.iter().collect();
            for (gradient, sum) in self.plain.iter().zip(sum.finish(&like)?) {
                tch::no_grad(|| gradient.shallow_clone().f_copy_(&sum))?;
            }
        }
        let Some(sum) = self.left_sum else {
            return Ok(());
        };
        let like: Vec<&Tensor> = self.approximations.iter().map(|a| &a.left).collect();
        let lefts = orthogonalized(&sum.finish(&like)?)?;
        let rights = self.approximations.iter().zip(&lefts);
        let rights = rights
            .map(|(a, left)| a.matrix.f_transpose(0, 1)?.f_matmul(left))
            .collect::<std::result::Result<Vec<_>, _>>()?;
        let rights: Vec<&Tensor> = rights.iter().collect();
        let rights = match Packed::start(&self.group, &rights, ReduceOp::Sum, self.purpose)? {
            Some(sum) => sum.finish(&rights)?,
            None => Vec::new(),
        };
        let mut bases = lock(&self.bases);
        let approximations = self.approximations.into_iter();
        for (approximation, (left, right)) in approximations.zip(lefts.iter().zip(rights)) {
            bases.insert(approximation.id.clone(), next_basis(&right)?);
            approximation.finish(left, &right, self.op, self.group.size())?;
        }
        Ok(())
    }
}

/// Orthogonalizes the columns of matrices, those of one shape in one operation.
fn orthogonalized(matrices: &[Tensor]) -> Result<Vec<Tensor>> {
    let mut by_shape: BTreeMap<Vec<i64>, Vec<usize>> = BTreeMap::new();
    for (number, matrix) in matrices.iter().enumerate() {
        by_shape.entry(matrix.size()).or_default().push(number);
    }
    let mut all: Vec<(usize, Tensor)> = Vec::with_capacity(matrices.len());
    for numbers in by_shape.into_values() {
        let batch: Vec<&Tensor> = numbers.iter().map(|&number| &matrices[number]).collect();
        let orthogonal = gram_schmidt(&Tensor::f_stack(&batch, 0)?)?;
        all.extend(numbers.into_iter().zip(orthogonal.f_unbind(0)?));
    }
    all.sort_by_key(|(number, _)| *number);
    Ok(all.into_iter().map(|(_, matrix)| matrix).collect())
}

/// Makes the columns of a batch of matrices orthonormal. The few columns need no solver, and the host reads no value.
fn gram_schmidt(batch: &Tensor) -> Result<Tensor> {
    let mut rest: Vec<Tensor> = batch.f_split(1, -1)?;
    let mut columns: Vec<Tensor> = Vec::with_capacity(rest.len());
    while !rest.is_empty() {
        let column = rest.remove(0);
        let norm =
            column
                .f_mul(&column)?
                .f_sum_dim_intlist([1i64].as_slice(), true, Kind::Float)?;
        // A column of zeros stays zero.
        let norm = norm.f_sqrt()?;
        let norm = norm.f_add(&norm.f_eq(0.0)?.f_to_kind(Kind::Float)?)?;
        let column = column.f_div(&norm)?;
        for other in &mut rest {
            let overlap = column.f_mul(other)?;
            let overlap = overlap.f_sum_dim_intlist([1i64].as_slice(), true, Kind::Float)?;
            *other = other.f_sub(&column.f_mul(&overlap)?)?;
        }
        columns.push(column);
    }
    Ok(Tensor::f_cat(&columns, -1)?)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// A step without gradients, or with NaN, must not silence a matrix forever.
    #[test]
    fn a_useless_basis_is_replaced() {
        let options = (Kind::Float, Device::Cpu);
        let first = first_basis(&Tensor::zeros([1], options), 6, 2).unwrap();
        for useless in [0.0, f64::NAN, f64::INFINITY] {
            let last = Tensor::full([6, 2], useless, options);
            assert_eq!(next_basis(&last).unwrap(), first, "{useless}");
        }
        let last = Tensor::randn([6, 2], options);
        let off = (next_basis(&last).unwrap() - last).abs().max();
        assert!(off.double_value(&[]) < 1e-6);
    }

    #[test]
    fn columns_become_orthonormal_and_span_the_same_space() {
        tch::manual_seed(1);
        let batch = Tensor::randn([3, 20, 4], (Kind::Float, Device::Cpu));
        let orthogonal = gram_schmidt(&batch).unwrap();
        let gram = orthogonal.transpose(1, 2).matmul(&orthogonal);
        let identity = Tensor::eye(4, (Kind::Float, Device::Cpu));
        assert!((gram - identity).abs().max().double_value(&[]) < 1e-5);
        let projected = orthogonal.matmul(&orthogonal.transpose(1, 2).matmul(&batch));
        assert!((projected - &batch).abs().max().double_value(&[]) < 1e-5);
        let small = gram_schmidt(&(&batch * 1e-6)).unwrap();
        assert!((small - &orthogonal).abs().max().double_value(&[]) < 1e-4);
        let zeros = Tensor::zeros([1, 5, 2], (Kind::Float, Device::Cpu));
        assert_eq!(gram_schmidt(&zeros).unwrap(), zeros);
    }
}
