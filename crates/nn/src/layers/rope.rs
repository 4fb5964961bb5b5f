//! Rotary position embeddings (RoPE).
//!
//! Element `i` of a head and element `i + head_dim / 2` form a pair, which position `t` rotates by `t · theta^(-2i /
//! head_dim)`, as in Hugging Face's Llama. The sine and cosine tables are computed once in fp64 and shared by all
//! blocks of a model.

use std::{ops::Range, rc::Rc};

use tch::{Device, Kind, Tensor};
use trainyard_arch::{RopeScaling, rotary_frequencies};
use trainyard_torch::{TorchError, autograd, kernel};

use crate::{Builder, NnError, Result};

/// The RoPE tables of a model. Clones share them.
#[derive(Clone, Debug)]
pub struct Rope(Rc<Tables>);

/// Both are [seq_len, 1, head_dim], laid out so that the rotation of `x` is `x * cos + swapped(x) * sin`, where
/// `swapped` swaps the halves of a head.
#[derive(Debug)]
struct Tables {
    cos: Tensor,
    sin: Tensor,
    seq_len: i64,
    /// Whether the sequence is sharded over context-parallel ranks, which fixes its length.
    is_sharded: bool,
}

impl Rope {
    /// Computes the tables for this rank's positions of `seq_len`, on the builder's device.
    pub fn build(
        builder: &Builder,
        seq_len: usize,
        head_dim: usize,
        theta: f64,
        scaling: Option<&RopeScaling>,
    ) -> Result<Rope> {
        let cp = builder.context_parallel();
        let positions = cp.positions(seq_len)?;
        let is_sharded = cp.size() > 1;
        let seq_len = positions.iter().map(ExactSizeIterator::len).sum::<usize>();
        let angles = angles(&positions, &rotary_frequencies(head_dim, theta, scaling))?;
        let factor = scaling.map_or(1.0, RopeScaling::attention_scaling);
        let (cos, sin) = (
            angles.f_cos()?.f_mul_scalar(factor)?,
            angles.f_sin()?.f_mul_scalar(factor)?,
        );
        Ok(Rope(Rc::new(Tables {
            cos: builder.table(&Tensor::f_cat(&[&cos, &cos], -1)?)?,
            sin: builder.table(&Tensor::f_cat(&[&sin.f_neg()?, &sin], -1)?)?,
            seq_len: seq_len as i64,
            is_sharded,
        })))
    }

    /// Rotates `x` [batch, seq, heads, head_dim].
    ///
    /// Backward applies the inverse rotation and saves nothing but the tables.
    pub fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let (_, length, _, _) = x.size4()?;
        let (cos, sin) = self.first(length)?;
        let tables = (cos.shallow_clone(), sin.shallow_clone());
        Ok(autograd::apply(
            &[x],
            |_, inputs| rotated(inputs[0], &cos, &sin, 1.0),
            move |_, gradients| match gradients {
                [Some(gradient)] => Ok(vec![Some(rotated(gradient, &tables.0, &tables.1, -1.0)?)]),
                _ => Ok(vec![None]),
            },
        )?)
    }

    fn first(&self, length: i64) -> Result<(Tensor, Tensor)> {
        let Tables { cos, sin, .. } = &*self.0;
        let limit = self.0.seq_len;
        if length > limit || (self.0.is_sharded && length != limit) {
            return Err(NnError::SequenceTooLong { length, limit });
        }
        Ok((cos.f_narrow(0, 0, length)?, sin.f_narrow(0, 0, length)?))
    }
}

/// Rotates `x` by the angles times `direction`, 1 or -1.
fn rotated(x: &Tensor, cos: &Tensor, sin: &Tensor, direction: f64) -> Result<Tensor, TorchError> {
    let half = x.size().last().copied().unwrap_or(0) / 2;
    let swapped = x.f_roll(half, -1)?;
    let out = x.f_mul(cos)?;
    kernel::addcmul_(&out, &swapped, sin, direction)?;
    Ok(out)
}

fn angles(positions: &[Range<usize>], frequencies: &[f64]) -> Result<Tensor> {
    let double = (Kind::Double, Device::Cpu);
    let frequencies = Tensor::f_from_slice(frequencies)?;
    let intervals = positions.iter();
    let intervals = intervals.map(|p| Tensor::f_arange_start(p.start as i64, p.end as i64, double));
    let positions = Tensor::f_cat(&intervals.collect::<Result<Vec<_>, _>>()?, 0)?;
    Ok(positions.f_outer(&frequencies)?.f_unsqueeze(1)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rope(seq_len: usize, head_dim: usize) -> Rope {
        let builder = Builder::new(1).kind(Kind::Double);
        Rope::build(&builder, seq_len, head_dim, 10000.0, None).unwrap()
    }

    #[test]
    fn a_longer_sequence_is_rejected() {
        let x = Tensor::zeros([1, 5, 1, 8], (Kind::Double, Device::Cpu));
        let error = rope(4, 8).rotate(&x).unwrap_err();
        assert!(matches!(
            error,
            NnError::SequenceTooLong {
                length: 5,
                limit: 4
            }
        ));
    }

    #[test]
    fn rotates_each_pair_by_its_angle() {
        let x = Tensor::ones([1, 3, 1, 4], (Kind::Double, Device::Cpu));
        let rotated = Vec::<f64>::try_from(rope(3, 4).rotate(&x).unwrap().reshape(-1)).unwrap();
        for position in 0..3 {
            for pair in 0..2 {
                let angle = position as f64 * 10000f64.powf(-(pair as f64) / 2.0);
                let (sin, cos) = angle.sin_cos();
                let (a, b) = (
                    rotated[position * 4 + pair],
                    rotated[position * 4 + pair + 2],
                );
                assert!((a - (cos - sin)).abs() < 1e-15 && (b - (cos + sin)).abs() < 1e-15);
            }
        }
    }

    proptest! {
        #[test]
        fn keeps_norms_and_depends_on_distance_only(shift in 0i64..5, gap in 0i64..5) {
            let options = (Kind::Double, Device::Cpu);
            let (q, k) = (Tensor::randn([8], options), Tensor::randn([8], options));
            let rope = rope(10, 8);
            let everywhere = |v: &Tensor| rope.rotate(&v.expand([1, 10, 1, 8], false)).unwrap();
            let (q_all, k_all) = (everywhere(&q), everywhere(&k));
            let score = |i: i64, j: i64| {
                (q_all.narrow(1, i, 1) * k_all.narrow(1, j, 1)).sum(Kind::Double).double_value(&[])
            };
            prop_assert!((score(shift, shift + gap) - score(0, gap)).abs() < 1e-9);
            let length = |t: &Tensor| t.norm().double_value(&[]);
            prop_assert!((length(&q_all.narrow(1, shift, 1)) - length(&q)).abs() < 1e-9);
        }
    }
}
