//! Where parameters come from: a path of names, a place, a kind and a seed.
//!
//! Layers ask the builder for parameters by their last name; the path it was narrowed to gives the
//! rest. On [`Place::Meta`] a parameter has a shape and no elements, so that a model of any size
//! can be built and its step followed without memory.

use std::ops::Range;

use tch::{Device, Kind, Tensor};
use trainyard_torch::{memory, meta};
use trainyard_trace::MemoryKind;

use crate::{Init, Parameter, Result, parameter::shape_of};

/// Elements made at a time, which bounds what building needs beside the model itself.
const CHUNK: u64 = 1 << 20;

/// Where tensors live.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub enum Place {
    /// Main memory.
    #[default]
    Cpu,
    /// The CUDA device of that index.
    Cuda(usize),
    /// Nowhere: shapes and kinds only.
    Meta,
}

impl Place {
    /// A tensor of this shape and kind, its elements not set.
    pub fn empty(self, shape: &[usize], kind: Kind) -> Result<Tensor> {
        let shape: Vec<i64> = shape.iter().map(|&length| length as i64).collect();
        Ok(match self {
            Place::Cpu => Tensor::f_empty(&shape[..], (kind, Device::Cpu))?,
            Place::Cuda(index) => Tensor::f_empty(&shape[..], (kind, Device::Cuda(index)))?,
            Place::Meta => meta::empty(&shape, kind)?,
        })
    }

    /// A tensor with these elements, each rounded to `kind`.
    pub fn tensor(self, values: &Tensor, kind: Kind) -> Result<Tensor> {
        let mut tensor = self.empty(&shape_of(values), kind)?;
        if self != Place::Meta {
            tensor.f_copy_(values)?;
        }
        Ok(tensor)
    }
}

/// Makes the parameters of a model.
#[derive(Clone, Debug)]
pub struct Builder {
    seed: u64,
    place: Place,
    kind: Kind,
    compute_kind: Option<Kind>,
    path: String,
}

impl Builder {
    /// A builder for the root of a model: on the CPU, in single precision.
    pub fn new(seed: u64) -> Builder {
        Builder {
            seed,
            place: Place::Cpu,
            kind: Kind::Float,
            compute_kind: None,
            path: String::new(),
        }
    }

    /// Puts what is built at `place`.
    #[must_use]
    pub fn place(self, place: Place) -> Builder {
        Builder { place, ..self }
    }

    /// The kind of the master copies.
    #[must_use]
    pub fn kind(self, kind: Kind) -> Builder {
        Builder { kind, ..self }
    }

    /// The kind layers compute in; that of the master copies unless told.
    #[must_use]
    pub fn compute_kind(self, kind: Kind) -> Builder {
        Builder {
            compute_kind: Some(kind),
            ..self
        }
    }

    /// The builder for the part of the model called `name` below this one.
    #[must_use]
    pub fn at(&self, name: &str) -> Builder {
        Builder {
            path: self.name_of(name),
            ..self.clone()
        }
    }

    /// The path this builder was narrowed to.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// A new trained parameter called `name` below this path.
    pub fn parameter(&self, name: &str, shape: &[usize], init: Init) -> Result<Parameter> {
        let name = self.name_of(name);
        let tensor = memory::scope(MemoryKind::Parameter, || self.place.empty(shape, self.kind))?;
        if self.place != Place::Meta {
            self.fill(&name, &tensor, init)?;
        }
        let tensor = tensor.f_set_requires_grad(true)?;
        Parameter::computing_in(self.compute_kind.unwrap_or(self.kind), name, tensor)
    }

    /// A constant table of the model, in the compute kind.
    pub fn table(&self, values: &Tensor) -> Result<Tensor> {
        self.place
            .tensor(values, self.compute_kind.unwrap_or(self.kind))
    }

    fn name_of(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }

    fn fill(&self, name: &str, tensor: &Tensor, init: Init) -> Result<()> {
        let flat = tensor.f_view(-1i64)?;
        for chunk in chunks(flat.numel() as u64) {
            let (start, length) = (chunk.start as i64, (chunk.end - chunk.start) as i64);
            let values = Tensor::f_from_slice(&init.values(name, chunk, self.seed))?;
            flat.f_narrow(0, start, length)?.f_copy_(&values)?;
        }
        Ok(())
    }
}

fn chunks(length: u64) -> impl Iterator<Item = Range<u64>> {
    (0..length)
        .step_by(CHUNK as usize)
        .map(move |start| start..(start + CHUNK).min(length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::init::uniform;

    #[test]
    fn names_are_the_path_and_elements_follow_them() -> Result<()> {
        let builder = Builder::new(7).at("model").at("layers.3");
        let weight = builder.parameter("weight", &[3, 5], Init::Uniform { bound: 0.5 })?;
        assert_eq!(weight.name(), "model.layers.3.weight");
        assert_eq!(weight.shape(), [3, 5]);
        let values = Vec::<f32>::try_from(weight.tensor().reshape(-1i64))?;
        assert_eq!(values, uniform("model.layers.3.weight", 0..15, 0.5, 7));
        Ok(())
    }

    #[test]
    fn wider_kinds_hold_the_elements_of_single_precision() -> Result<()> {
        let make = |kind| {
            Builder::new(1)
                .kind(kind)
                .parameter("w", &[9], Init::with_std(0.02))
        };
        let (single, double) = (make(Kind::Float)?, make(Kind::Double)?);
        assert_eq!(double.kind(), Kind::Double);
        assert_eq!(double.compute_kind(), Kind::Double);
        assert!(single.tensor().to_kind(Kind::Double).equal(double.tensor()));
        Ok(())
    }

    #[test]
    fn chunks_cover_everything_once() {
        for length in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7] {
            let mut next = 0;
            for chunk in chunks(length) {
                assert_eq!(chunk.start, next);
                assert!(chunk.end > chunk.start);
                next = chunk.end;
            }
            assert_eq!(next, length);
        }
    }

    #[test]
    fn meta_parameters_have_shape_and_no_elements() -> Result<()> {
        let weight = Builder::new(1).place(Place::Meta).parameter(
            "w",
            &[1 << 20, 1 << 20],
            Init::with_std(0.02),
        )?;
        assert_eq!(weight.num_elements(), 1 << 40);
        assert!(weight.is_trainable());
        Ok(())
    }
}
