//! Creates the parameters of a model from a path of names, a device, a dtype and a seed.
//!
//! A layer asks the builder for parameters by their last name; the builder's path supplies the rest. On
//! [`Device::Meta`] a parameter has a shape and no memory, so that a model of any size can be built for a dry run.
//!
//! Given tensor, context and expert parallelism, the builder creates only this rank's shard of every parameter.
//! Initial values depend on an element's position in the full tensor, so every layout starts from the same model.

use std::collections::HashSet;
use std::ops::Range;
use std::rc::Rc;

use tch::{Kind, Tensor};
use trainyard_mesh::{Axis, Dim, Layout, Placement, Region};
use trainyard_torch::{Group, device, memory, meta, storage};
use trainyard_trace::MemoryKind;

use crate::initial_values::{RandomValues, Undefined};
use crate::loss::wide;
use crate::parameter::{ParameterSpec, shape_of};
use crate::{ContextParallel, ExpertParallel, Init, Parameter, Result, TensorParallel};

/// The device of a tensor. Unlike `tch::Device`, it includes meta.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub enum Device {
    /// Host memory.
    #[default]
    Cpu,
    /// The CUDA device with this index.
    Cuda(usize),
    /// The meta device: shapes and dtypes without memory.
    Meta,
}

impl From<tch::Device> for Device {
    fn from(device: tch::Device) -> Device {
        match device {
            tch::Device::Cuda(index) => Device::Cuda(index),
            _ => Device::Cpu,
        }
    }
}

impl Device {
    /// Whether tensors have values that are worth computing: not on meta, and not on a GPU whose kernels compute nothing.
    fn holds_values(self) -> bool {
        match self {
            Device::Cpu => true,
            Device::Cuda(_) => device::computes_values(),
            Device::Meta => false,
        }
    }

    /// An uninitialized tensor of this shape and dtype.
    pub fn empty(self, shape: &[usize], kind: Kind) -> Result<Tensor> {
        let shape: Vec<i64> = shape.iter().map(|&length| length as i64).collect();
        Ok(match self {
            Device::Cpu => Tensor::f_empty(&shape[..], (kind, tch::Device::Cpu))?,
            Device::Cuda(index) => Tensor::f_empty(&shape[..], (kind, tch::Device::Cuda(index)))?,
            Device::Meta => meta::empty(&shape, kind)?,
        })
    }

    /// A tensor with these values, rounded to `kind`.
    pub fn tensor(self, values: &Tensor, kind: Kind) -> Result<Tensor> {
        let mut tensor = self.empty(&shape_of(values), kind)?;
        if self != Device::Meta {
            tensor.f_copy_(values)?;
        }
        Ok(tensor)
    }
}

/// Creates the parameters of a model.
#[derive(Clone, Debug)]
pub struct Builder {
    seed: u64,
    device: Device,
    kind: Kind,
    compute_kind: Option<Kind>,
    tp: TensorParallel,
    cp: ContextParallel,
    ep: ExpertParallel,
    /// The parameters to allocate; all if `None`.
    only: Option<Rc<HashSet<String>>>,
    is_deferred: bool,
    num_loss_chunks: usize,
    path: String,
}

impl Builder {
    /// A builder for the root of a model, on the CPU in fp32.
    pub fn new(seed: u64) -> Builder {
        Builder {
            seed,
            device: Device::Cpu,
            kind: Kind::Float,
            compute_kind: None,
            tp: TensorParallel::disabled(),
            cp: ContextParallel::disabled(),
            ep: ExpertParallel::disabled(),
            only: None,
            is_deferred: false,
            num_loss_chunks: 1,
            path: String::new(),
        }
    }

    /// Sets the device of parameters.
    #[must_use]
    pub fn device(self, device: Device) -> Builder {
        Builder { device, ..self }
    }

    /// Sets the dtype of parameters (master weights).
    #[must_use]
    pub fn kind(self, kind: Kind) -> Builder {
        Builder { kind, ..self }
    }

    /// Allocates only the parameters with these global names; the others are on [`Device::Meta`]. For a pipeline
    /// stage, which runs some units of a model.
    #[must_use]
    pub fn only(self, names: HashSet<String>) -> Builder {
        Builder {
            only: Some(Rc::new(names)),
            ..self
        }
    }

    /// Creates parameters without memory. The strategy that wraps the model allocates what this rank keeps, and
    /// computes the initial values of that alone, so that a model may be larger than the memory of a rank.
    #[must_use]
    pub fn deferred(self) -> Builder {
        Builder {
            is_deferred: true,
            ..self
        }
    }

    /// Sets the dtype that layers compute in; by default the dtype of the parameters.
    #[must_use]
    pub fn compute_kind(self, kind: Kind) -> Builder {
        Builder {
            compute_kind: Some(kind),
            ..self
        }
    }

    /// The tensor-parallel ranks that the model is built for.
    #[must_use]
    pub fn with_tensor_parallel(self, tp: TensorParallel) -> Builder {
        Builder { tp, ..self }
    }

    /// The context-parallel ranks that the model is built for.
    #[must_use]
    pub fn with_context_parallel(self, cp: ContextParallel) -> Builder {
        Builder { cp, ..self }
    }

    /// The expert-parallel ranks that the model is built for.
    #[must_use]
    pub fn with_expert_parallel(self, ep: ExpertParallel) -> Builder {
        Builder { ep, ..self }
    }

    /// Makes the head of a language model compute the loss in this many chunks of the tokens, if it is given their
    /// targets ([`Context::targets`](crate::Context::targets)), so that logits never exist as a whole.
    #[must_use]
    pub fn with_num_loss_chunks(self, num_loss_chunks: usize) -> Builder {
        Builder {
            num_loss_chunks,
            ..self
        }
    }

    /// Whether all parameters are on the meta device.
    pub fn is_meta(&self) -> bool {
        self.device == Device::Meta
    }

    /// The seed of initialization and dropout.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The dtype that layers compute in.
    pub fn computes_in(&self) -> Kind {
        self.compute_kind.unwrap_or(self.kind)
    }

    /// The number of chunks in which the head computes the loss; 1 if it returns logits.
    pub fn num_loss_chunks(&self) -> usize {
        self.num_loss_chunks
    }

    /// The tensor-parallel ranks that the model is built for.
    pub fn tensor_parallel(&self) -> TensorParallel {
        self.tp.clone()
    }

    /// The context-parallel ranks that the model is built for.
    pub fn context_parallel(&self) -> ContextParallel {
        self.cp.clone()
    }

    /// The expert-parallel ranks that the model is built for.
    pub fn expert_parallel(&self) -> ExpertParallel {
        self.ep.clone()
    }

    /// The builder for the submodule `name`, like candle's `VarBuilder::pp`.
    #[must_use]
    pub fn push(&self, name: &str) -> Builder {
        Builder {
            path: self.name_of(name),
            ..self.clone()
        }
    }

    /// The path of this builder: the prefix of parameter names.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// A trainable parameter called `name` below this path, replicated on every rank.
    pub fn parameter(&self, name: &str, shape: &[usize], init: Init) -> Result<Parameter> {
        self.build_parameter(name, shape, LocalShard::full(shape), None, init)
    }

    /// A parameter that is sharded over tensor-parallel ranks along `dim`.
    pub fn sharded(&self, name: &str, shape: &[usize], dim: Dim, init: Init) -> Result<Parameter> {
        if self.tp.size() == 1 {
            return self.parameter(name, shape, init);
        }
        let share = self.tp.shard_range(&self.name_of(name), shape[dim.0])?;
        let layout = Layout::replicated().with(Axis::Tp, Placement::Shard(dim));
        let local = LocalShard::sharded(shape, dim, share, layout);
        self.build_parameter(name, shape, local, None, init)
    }

    /// A parameter with one entry per expert along dim 0, sharded over expert-parallel ranks. Its layout is an expert
    /// layout even if one rank has all experts, because its gradients are reduced over other ranks than those of
    /// other parameters.
    pub fn experts(&self, name: &str, shape: &[usize], init: Init) -> Result<Parameter> {
        let share = self.ep.shard_range(&self.name_of(name), shape[0])?;
        let local = LocalShard::sharded(shape, Dim(0), share, Layout::experts());
        self.build_parameter(name, shape, local, None, init)
    }

    /// A buffer: part of the model's state, but not trained; replicated on every rank.
    pub fn buffer(&self, name: &str, shape: &[usize], init: Init) -> Result<Parameter> {
        let local = LocalShard {
            memory: MemoryKind::Other,
            ..LocalShard::full(shape)
        };
        let parameter = self.build_parameter(name, shape, local, None, init)?;
        let _ = parameter.tensor().f_set_requires_grad(false)?;
        Ok(parameter)
    }

    /// A buffer that forward updates from its batch, such as the running mean of BatchNorm. Data-parallel strategies give
    /// all ranks that of rank 0. It has at least fp32.
    pub fn running_stat(&self, name: &str, shape: &[usize], init: Init) -> Result<Parameter> {
        let wide = self.clone().kind(wide(self.kind));
        Ok(wide.buffer(name, shape, init)?.into_running_stat())
    }

    /// A parameter with one row per vocabulary entry, sharded over tensor-parallel ranks. The last rank's shard may
    /// be smaller if the vocabulary size is not divisible.
    pub fn vocab_sharded(&self, name: &str, shape: &[usize], init: Init) -> Result<Parameter> {
        if self.tp.size() == 1 {
            return self.parameter(name, shape, init);
        }
        let layout = Layout::replicated().with(Axis::Tp, Placement::Shard(Dim(0)));
        let local = LocalShard::sharded(shape, Dim(0), self.tp.vocab_range(shape[0]), layout);
        self.build_parameter(name, shape, local, None, init)
    }

    /// A parameter that is replicated on tensor-parallel ranks, each of which computes a partial gradient; the
    /// gradient is their sum.
    pub fn replicated(&self, name: &str, shape: &[usize], init: Init) -> Result<Parameter> {
        self.build_parameter(name, shape, LocalShard::full(shape), self.tp.group(), init)
    }

    /// A parameter of a position-wise operation. With sequence parallelism each rank has some positions and computes
    /// a partial gradient.
    pub fn positionwise(&self, name: &str, shape: &[usize], init: Init) -> Result<Parameter> {
        let partial_grad_group = self.tp.sequence_group();
        self.build_parameter(
            name,
            shape,
            LocalShard::full(shape),
            partial_grad_group,
            init,
        )
    }

    fn build_parameter(
        &self,
        name: &str,
        shape: &[usize],
        local: LocalShard,
        partial_grad_group: Option<&Group>,
        init: Init,
    ) -> Result<Parameter> {
        let name = self.name_of(name);
        let is_wanted = self.only.as_ref().is_none_or(|names| names.contains(&name));
        let device = if is_wanted { self.device } else { Device::Meta };
        // Another rank owns what is not wanted, so a dry run must not count it here.
        let has_memory = is_wanted && !(self.is_deferred && local.memory == MemoryKind::Parameter);
        let tensor = self.allocate(device, &local, has_memory)?;
        let parameter = Parameter::from_spec(
            ParameterSpec {
                name: name.clone(),
                shape: shape.to_vec(),
                layout: local.layout,
                compute_kind: self.computes_in(),
                partial_grad_group: partial_grad_group.cloned(),
            },
            tensor.f_set_requires_grad(true)?,
        );
        if is_wanted && !has_memory {
            parameter.defer(Undefined);
        }
        if device.holds_values() {
            parameter.initialize(RandomValues {
                name,
                init,
                seed: self.seed,
                shape: shape.to_vec(),
                region: local.region,
                kind: self.kind,
            })?;
        }
        Ok(parameter)
    }

    fn allocate(&self, device: Device, local: &LocalShard, has_memory: bool) -> Result<Tensor> {
        let lengths = &local.region.lengths;
        if has_memory {
            return memory::scope(local.memory, || device.empty(lengths, self.kind));
        }
        let lengths: Vec<i64> = lengths.iter().map(|&length| length as i64).collect();
        Ok(storage::new_released(
            &device.empty(&[0], self.kind)?,
            &lengths,
        )?)
    }

    /// A constant tensor of the model, in the compute dtype.
    pub fn table(&self, values: &Tensor) -> Result<Tensor> {
        self.device.tensor(values, self.computes_in())
    }

    fn name_of(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }
}

/// The shard of a parameter that this rank holds.
struct LocalShard {
    region: Region,
    layout: Layout,
    memory: MemoryKind,
}

impl LocalShard {
    fn full(shape: &[usize]) -> LocalShard {
        LocalShard {
            region: Region::full(shape),
            layout: Layout::replicated(),
            memory: MemoryKind::Parameter,
        }
    }

    /// The shard of a parameter that `layout` splits along `dim`.
    fn sharded(shape: &[usize], dim: Dim, share: Range<usize>, layout: Layout) -> LocalShard {
        let mut local = LocalShard::full(shape);
        local.region.offsets[dim.0] = share.start;
        local.region.lengths[dim.0] = share.len();
        LocalShard { layout, ..local }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::init::uniform;

    #[test]
    fn names_are_paths_and_initial_values_depend_on_them() -> Result<()> {
        let builder = Builder::new(7).push("model").push("layers.3");
        let weight = builder.parameter("weight", &[3, 5], Init::Uniform { bound: 0.5 })?;
        assert_eq!(weight.name(), "model.layers.3.weight");
        assert_eq!(weight.shape(), [3, 5]);
        let values = Vec::<f32>::try_from(weight.tensor().reshape(-1i64))?;
        assert_eq!(values, uniform("model.layers.3.weight", 0..15, 0.5, 7));
        Ok(())
    }

    #[test]
    fn initial_values_in_wider_dtypes_equal_those_in_fp32() -> Result<()> {
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
    fn deferred_parameters_have_no_memory_but_the_same_values() -> Result<()> {
        let full = Builder::new(3).parameter("w", &[7, 5], Init::with_std(0.02))?;
        let deferred = Builder::new(3)
            .deferred()
            .parameter("w", &[7, 5], Init::with_std(0.02))?;
        assert_eq!(deferred.tensor().size(), [7, 5]);
        assert!(deferred.tensor().data_ptr().is_null());
        let shard = Tensor::zeros([9], (Kind::Float, tch::Device::Cpu));
        deferred.copy_elements(11..20, &shard)?;
        let expected = full.tensor().reshape(-1i64).narrow(0, 11, 9);
        assert!(shard.equal(&expected));
        deferred.materialize()?;
        assert!(deferred.tensor().equal(full.tensor()));
        Ok(())
    }

    #[test]
    fn meta_parameters_have_shape_and_no_elements() -> Result<()> {
        let weight = Builder::new(1).device(Device::Meta).parameter(
            "w",
            &[1 << 20, 1 << 20],
            Init::with_std(0.02),
        )?;
        assert_eq!(weight.num_elements(), 1 << 40);
        assert!(weight.is_trainable());
        Ok(())
    }
}
