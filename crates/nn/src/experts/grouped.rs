//! Grouped GEMM: the products of every expert with its rows.

use tch::{Kind, Tensor};
use trainyard_torch::{TorchError, autograd, device, meta};

use crate::Result;

/// `x_e · weight_eᵀ` for every expert `e`; rows are sorted by expert, `num_rows[e]` each, and `weight` is [experts,
/// outputs, inputs].
pub(super) fn products(x: &Tensor, weight: &Tensor, num_rows: &[i64]) -> Result<Tensor> {
    let num_rows = num_rows.to_vec();
    Ok(autograd::apply(
        &[x, weight],
        |saver, inputs| {
            saver.save(inputs[0]);
            saver.save(inputs[1]);
            each(inputs[0], &inputs[1].f_transpose(1, 2)?, &num_rows)
        },
        {
            let num_rows = num_rows.clone();
            move |saved, gradients| {
                let ([x, weight], [Some(gradient)]) = (saved, gradients) else {
                    return Ok(vec![None, None]);
                };
                let gradient = gradient.f_contiguous()?;
                let d_x = each(&gradient, weight, &num_rows)?;
                let d_weight = weight_gradients(&gradient, x, weight, &num_rows)?;
                Ok(vec![Some(d_x), Some(d_weight)])
            }
        },
    )?)
}

/// `x_e · matrix_e` for every expert; `matrices` is [experts, inputs, outputs].
fn each(x: &Tensor, matrices: &Tensor, num_rows: &[i64]) -> Result<Tensor, TorchError> {
    if has_kernel(x) {
        return grouped_kernel(x, matrices, num_rows);
    }
    let (_, _, width) = matrices.size3()?;
    let out = meta::new_empty(x, &[x.size2()?.0, width])?;
    for (expert, start, number) in intervals(num_rows) {
        let (rows, target) = (
            x.f_narrow(0, start, number)?,
            out.f_narrow(0, start, number)?,
        );
        let _ = rows.f_mm_out(&target, &matrices.f_select(0, expert)?)?;
    }
    Ok(out)
}

/// `gradient_eᵀ · x_e` for every expert; zeros for an expert without rows.
fn weight_gradients(
    gradient: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    num_rows: &[i64],
) -> Result<Tensor, TorchError> {
    if has_kernel(x) {
        return grouped_kernel(&gradient.f_transpose(0, 1)?, x, num_rows);
    }
    let out = meta::new_empty(x, &weight.size())?;
    for (expert, start, number) in intervals(num_rows) {
        let rows = gradient.f_narrow(0, start, number)?.f_transpose(0, 1)?;
        let target = out.f_select(0, expert)?;
        let _ = rows.f_mm_out(&target, &x.f_narrow(0, start, number)?)?;
    }
    for (expert, _) in num_rows.iter().enumerate().filter(|&(_, &n)| n == 0) {
        let _ = out.f_select(0, expert as i64)?.f_zero_()?;
    }
    Ok(out)
}

/// The index, first row and number of rows of each expert with rows.
fn intervals(num_rows: &[i64]) -> impl Iterator<Item = (i64, i64, i64)> + '_ {
    let mut start = 0;
    let placed = num_rows.iter().enumerate().map(move |(expert, &number)| {
        start += number;
        (expert as i64, start - number, number)
    });
    placed.filter(|&(_, _, number)| number > 0)
}

/// Whether to use libtorch's grouped kernel. On CUDA it is one launch; on CPU it is a loop like ours, equally fast in
/// benchmarks, without fp64 support.
fn has_kernel(x: &Tensor) -> bool {
    !meta::is_meta(x) && x.device().is_cuda() && x.kind() == Kind::BFloat16
}

fn grouped_kernel(a: &Tensor, b: &Tensor, num_rows: &[i64]) -> Result<Tensor, TorchError> {
    let mut end = 0;
    let ends = num_rows.iter().map(|number| {
        end += number;
        end as i32
    });
    let ends = device::from_slice(&ends.collect::<Vec<i32>>(), a.device())?;
    Ok(a.f_internal_grouped_mm(b, Some(&ends), None::<&Tensor>, None::<Kind>)?)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    const OPTIONS: (Kind, Device) = (Kind::Double, Device::Cpu);

    /// The reference: a plain product per expert.
    fn reference(x: &Tensor, weight: &Tensor, num_rows: &[i64]) -> Tensor {
        let products = intervals(num_rows).map(|(expert, start, number)| {
            x.narrow(0, start, number)
                .matmul(&weight.select(0, expert).transpose(0, 1))
        });
        Tensor::cat(&products.collect::<Vec<_>>(), 0)
    }

    #[test]
    fn products_and_gradients_equal_those_per_expert() -> Result<()> {
        for num_rows in [[3i64, 2, 4], [0, 9, 0], [9, 0, 0], [4, 0, 5]] {
            let x = Tensor::randn([9, 4], OPTIONS).set_requires_grad(true);
            let weight = Tensor::randn([3, 5, 4], OPTIONS).set_requires_grad(true);
            let expected = reference(&x, &weight, &num_rows);
            expected.square().sum(Kind::Double).backward();
            let gradients = [x.grad().copy(), weight.grad().copy()];
            autograd::clear_grad(&x)?;
            autograd::clear_grad(&weight)?;
            let found = products(&x, &weight, &num_rows)?;
            found.square().sum(Kind::Double).backward();
            assert!(found.allclose(&expected, 1e-12, 1e-12, false));
            for (found, expected) in [x.grad(), weight.grad()].iter().zip(&gradients) {
                assert!(found.allclose(expected, 1e-12, 1e-12, false));
            }
        }
        Ok(())
    }

    /// Compares our loop with libtorch's grouped kernel on CPU: `cargo test --release -p trainyard-nn grouped --
    /// --ignored --nocapture`.
    #[test]
    #[ignore = "benchmark; run it alone with --ignored --nocapture"]
    fn loop_versus_grouped_kernel() -> Result<()> {
        tch::set_num_threads(1);
        for kind in [Kind::Float, Kind::BFloat16] {
            for (rows, experts, inputs, outputs) in [
                (4096, 16, 512, 704),
                (4096, 16, 352, 512),
                (2048, 8, 512, 704),
                (4096, 32, 512, 704),
                (4096, 128, 256, 256),
            ] {
                let options = (kind, Device::Cpu);
                let x = Tensor::randn([rows, inputs], options);
                let gradient = Tensor::randn([rows, outputs], options);
                let weight = Tensor::randn([experts, outputs, inputs], options);
                let across = weight.transpose(1, 2);
                let num_rows = vec![rows / experts; experts as usize];
                let fastest = |body: &dyn Fn() -> Result<Tensor, TorchError>| {
                    let once = |_| {
                        let began = std::time::Instant::now();
                        body().map(|_| 1e3 * began.elapsed().as_secs_f64())
                    };
                    (0..15)
                        .map(once)
                        .try_fold(f64::MAX, |a, b| Ok::<_, TorchError>(a.min(b?)))
                };
                let ours = fastest(&|| each(&x, &across, &num_rows))?;
                let theirs = fastest(&|| grouped_kernel(&x, &across, &num_rows))?;
                let our_gradient =
                    fastest(&|| weight_gradients(&gradient, &x, &weight, &num_rows))?;
                let transposed = gradient.transpose(0, 1);
                let their_gradient = fastest(&|| grouped_kernel(&transposed, &x, &num_rows))?;
                println!(
                    "{kind:?}, {rows} rows, {experts} experts, {inputs} to {outputs}: loop {ours:.2} ms, grouped \
                     kernel {theirs:.2} ms; weight gradients {our_gradient:.2} ms and {their_gradient:.2} ms"
                );
            }
        }
        Ok(())
    }

    #[test]
    fn gradients_without_rows_are_zero() -> Result<()> {
        let x = Tensor::zeros([0, 4], OPTIONS).set_requires_grad(true);
        let weight = Tensor::randn([3, 5, 4], OPTIONS).set_requires_grad(true);
        let found = products(&x, &weight, &[0, 0, 0])?;
        assert_eq!(found.size(), [0, 5]);
        found.sum(Kind::Double).backward();
        assert_eq!(weight.grad().abs().sum(Kind::Double).double_value(&[]), 0.0);
        Ok(())
    }
}
