//! Where parameters come from: a path of names, a place, a kind and a seed.
//!
//! Layers ask the builder for parameters by their last name; the path it was narrowed to gives the
//! rest. On [`Place::Meta`] a parameter has a shape and no elements, so that a model of any size
//! can be built and its step followed without memory.
//!
//! Told which ranks share matrices and sequences, it makes what this rank holds of every parameter,
//! and nothing else: elements depend on their place in the whole.

use std::collections::HashSet;
use std::ops::Range;
use std::rc::Rc;

use tch::{Device, Kind, Tensor};
use trainyard_mesh::{Axis, Dim, Layout, Placement, Region};
use trainyard_torch::{Group, memory, meta, storage};
use trainyard_trace::MemoryKind;

use crate::parameter::{Plan, shape_of};
use crate::{ContextParallel, ExpertParallel, Init, Parameter, Result, TensorParallel};

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
    tp: TensorParallel,
    cp: ContextParallel,
    ep: ExpertParallel,
    /// The parameters that get memory; all if absent.
    only: Option<Rc<HashSet<String>>>,
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
            tp: TensorParallel::alone(),
            cp: ContextParallel::alone(),
            ep: ExpertParallel::alone(),
            only: None,
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

    /// Gives memory to these parameters alone, by their global names; the others are as on
    /// [`Place::Meta`]. For a rank that runs some units of a model.
    #[must_use]
    pub fn only(self, names: HashSet<String>) -> Builder {
        Builder {
            only: Some(Rc::new(names)),
            ..self
        }
    }

    /// The kind layers compute in; that of the master copies unless told.
    #[must_use]
    pub fn compute_kind(self, kind: Kind) -> Builder {
        Builder {
            compute_kind: Some(kind),
            ..self
        }
    }

    /// The ranks that share every matrix.
    #[must_use]
    pub fn with_tensor_parallel(self, tp: TensorParallel) -> Builder {
        Builder { tp, ..self }
    }

    /// The ranks that share every sequence.
    #[must_use]
    pub fn with_context_parallel(self, cp: ContextParallel) -> Builder {
        Builder { cp, ..self }
    }

    /// The ranks that have different experts.
    #[must_use]
    pub fn with_expert_parallel(self, ep: ExpertParallel) -> Builder {
        Builder { ep, ..self }
    }

    /// Whether nothing it builds has memory.
    pub fn is_meta(&self) -> bool {
        self.place == Place::Meta
    }

    /// What everything random of the model depends on, beside names.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The kind layers compute in.
    pub fn computes_in(&self) -> Kind {
        self.compute_kind.unwrap_or(self.kind)
    }

    /// The ranks that share every matrix.
    pub fn tensor_parallel(&self) -> TensorParallel {
        self.tp.clone()
    }

    /// The ranks that share every sequence.
    pub fn context_parallel(&self) -> ContextParallel {
        self.cp.clone()
    }

    /// The ranks that have different experts.
    pub fn expert_parallel(&self) -> ExpertParallel {
        self.ep.clone()
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

    /// A new trained parameter called `name` below this path, the same on every rank.
    pub fn parameter(&self, name: &str, shape: &[usize], init: Init) -> Result<Parameter> {
        self.made(name, shape, Held::whole(shape), None, init)
    }

    /// A parameter that tensor-parallel ranks cut along `dim`.
    pub fn cut(&self, name: &str, shape: &[usize], dim: Dim, init: Init) -> Result<Parameter> {
        if self.tp.size() == 1 {
            return self.parameter(name, shape, init);
        }
        let share = self.tp.share(&self.name_of(name), shape[dim.0])?;
        let layout = Layout::replicated().with(Axis::Tp, Placement::Shard(dim));
        let held = Held::cut(shape, dim, share, layout);
        self.made(name, shape, held, None, init)
    }

    /// A parameter of experts, one after the other along the first dimension, of which ranks of `ep`
    /// have an interval each. Its layout says so even where one rank has all: along other axes its
    /// gradients are added up over other ranks than those of other parameters.
    pub fn experts(&self, name: &str, shape: &[usize], init: Init) -> Result<Parameter> {
        let share = self.ep.share(&self.name_of(name), shape[0])?;
        let held = Held::cut(shape, Dim(0), share, Layout::of_experts());
        self.made(name, shape, held, None, init)
    }

    /// What belongs to the model's state but is not trained, the same on every rank.
    pub fn buffer(&self, name: &str, shape: &[usize], init: Init) -> Result<Parameter> {
        let held = Held {
            memory: MemoryKind::Other,
            ..Held::whole(shape)
        };
        let parameter = self.made(name, shape, held, None, init)?;
        let _ = parameter.tensor().f_set_requires_grad(false)?;
        Ok(parameter)
    }

    /// A parameter with a row for each word of a vocabulary, of which tensor-parallel ranks have an
    /// interval each. Vocabularies are what they are, so the last rank's may be shorter.
    pub fn words(&self, name: &str, shape: &[usize], init: Init) -> Result<Parameter> {
        if self.tp.size() == 1 {
            return self.parameter(name, shape, init);
        }
        let layout = Layout::replicated().with(Axis::Tp, Placement::Shard(Dim(0)));
        let held = Held::cut(shape, Dim(0), self.tp.interval(shape[0]), layout);
        self.made(name, shape, held, None, init)
    }

    /// A parameter that every tensor-parallel rank holds whole and computes with in its own way, so
    /// that its gradient is the sum of theirs.
    pub fn shared(&self, name: &str, shape: &[usize], init: Init) -> Result<Parameter> {
        self.made(name, shape, Held::whole(shape), self.tp.group(), init)
    }

    /// A parameter that computes with each position alone, of which this rank may have a part.
    pub fn positionwise(&self, name: &str, shape: &[usize], init: Init) -> Result<Parameter> {
        let terms = self.tp.sequence_group();
        self.made(name, shape, Held::whole(shape), terms, init)
    }

    fn made(
        &self,
        name: &str,
        shape: &[usize],
        held: Held,
        terms: Option<&Group>,
        init: Init,
    ) -> Result<Parameter> {
        let name = self.name_of(name);
        let lengths = &held.region.lengths;
        let is_wanted = self.only.as_ref().is_none_or(|names| names.contains(&name));
        let place = if is_wanted { self.place } else { Place::Meta };
        let tensor = memory::scope(held.memory, || place.empty(lengths, self.kind))?;
        if !is_wanted {
            // Another rank's: not even a dry run counts it here.
            storage::release(&tensor)?;
        }
        if place != Place::Meta {
            self.fill(&name, &tensor, shape, &held.region, init)?;
        }
        let plan = Plan {
            name,
            shape: shape.to_vec(),
            layout: held.layout,
            compute_kind: self.computes_in(),
            terms: terms.cloned(),
        };
        Ok(Parameter::planned(plan, tensor.f_set_requires_grad(true)?))
    }

    /// A constant table of the model, in the compute kind.
    pub fn table(&self, values: &Tensor) -> Result<Tensor> {
        self.place.tensor(values, self.computes_in())
    }

    fn name_of(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }

    fn fill(
        &self,
        name: &str,
        tensor: &Tensor,
        shape: &[usize],
        region: &Region,
        init: Init,
    ) -> Result<()> {
        let flat = tensor.f_view(-1i64)?;
        let mut filled = 0;
        let mut copy = |values: &[f32]| -> Result<()> {
            let length = values.len() as i64;
            let place = flat.f_narrow(0, filled, length)?;
            place
                .shallow_clone()
                .f_copy_(&Tensor::f_from_slice(values)?)?;
            filled += length;
            Ok(())
        };
        let mut values = Vec::new();
        for chunk in region.runs(shape).flat_map(chunks) {
            values.extend(init.values(name, chunk, self.seed));
            if values.len() as u64 >= CHUNK {
                copy(&values)?;
                values.clear();
            }
        }
        copy(&values)
    }
}

/// What a rank holds of a parameter.
struct Held {
    region: Region,
    layout: Layout,
    memory: MemoryKind,
}

impl Held {
    fn whole(shape: &[usize]) -> Held {
        Held {
            region: Region::whole(shape),
            layout: Layout::replicated(),
            memory: MemoryKind::Parameter,
        }
    }

    /// What is left of it where ranks cut along `dim`, as `layout` says.
    fn cut(shape: &[usize], dim: Dim, share: Range<usize>, layout: Layout) -> Held {
        let mut held = Held::whole(shape);
        held.region.offsets[dim.0] = share.start;
        held.region.lengths[dim.0] = share.len();
        Held { layout, ..held }
    }
}

/// Pieces of a run, none longer than [`CHUNK`].
fn chunks(run: Range<usize>) -> impl Iterator<Item = Range<u64>> {
    let (start, end) = (run.start as u64, run.end as u64);
    (start..end)
        .step_by(CHUNK as usize)
        .map(move |start| start..(start + CHUNK).min(end))
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
            for chunk in chunks(0..length as usize) {
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
