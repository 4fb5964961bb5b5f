//! Optimizer state: the tensors that an optimizer keeps per parameter.
//!
//! They are allocated when a parameter first has a gradient, so that frozen parameters cost no memory, and
//! on the device of the parameter.

use std::collections::HashMap;

use tch::Tensor;
use trainyard_nn::Parameter;
use trainyard_torch::memory;
use trainyard_trace::MemoryKind;

use crate::batch::Batch;
use crate::{OptimError, Result};
use trainyard_torch::scalar;

/// The methods of [`Optimizer`](crate::Optimizer) that concern the state alone, for an optimizer with one [`State`].
macro_rules! delegate_state {
    ($field:ident) => {
        fn kinds(&self) -> Vec<&'static str> {
            self.$field.kinds()
        }

        fn num_moments(&self, _: &::trainyard_nn::Parameter) -> u64 {
            self.$field.num_moments()
        }

        fn state(&self) -> Vec<(String, ::tch::Tensor)> {
            self.$field.named()
        }

        fn load_state(&mut self, state: Vec<(String, ::tch::Tensor)>) -> $crate::Result<()> {
            self.$field.load(state)
        }

        fn clear_state(&mut self) {
            self.$field.clear();
        }
    };
}

pub(crate) use delegate_state;

/// One kind of state tensor, such as a moment.
#[derive(Copy, Clone)]
pub(crate) struct Slot {
    /// The name in checkpoints, before the name of the parameter.
    pub(crate) name: &'static str,
    /// The size of the tensor.
    pub(crate) extent: Extent,
}

#[derive(Copy, Clone, PartialEq)]
pub(crate) enum Extent {
    /// Shape and dtype of the parameter.
    Parameter,
    /// A float32 scalar.
    Scalar,
}

/// Parameters with `N` state tensors each.
pub(crate) struct State<const N: usize> {
    slots: [Slot; N],
    entries: Vec<Entry>,
}

/// The state tensors of every parameter.
pub(crate) struct Restored(Vec<Option<Vec<Tensor>>>);

struct Entry {
    parameter: Parameter,
    /// One tensor per slot, allocated at the first gradient.
    tensors: Option<Vec<Tensor>>,
}

impl<const N: usize> State<N> {
    pub(crate) fn new(slots: [Slot; N], parameters: Vec<Parameter>) -> State<N> {
        let entries = parameters.into_iter().map(|parameter| Entry {
            parameter,
            tensors: None,
        });
        State {
            slots,
            entries: entries.collect(),
        }
    }

    /// Applies `rule` to all parameters that have a gradient, one dtype at a time.
    pub(crate) fn update(&mut self, rule: impl Fn(&Batch<N>) -> Result<()>) -> Result<()> {
        tch::no_grad(|| {
            memory::scope(MemoryKind::Optimizer, || {
                self.batches()?.iter().try_for_each(rule)
            })
        })
    }

    /// Applies `rule` to all parameters that have a gradient at once, one batch per dtype.
    pub(crate) fn update_together(
        &mut self,
        rule: impl FnOnce(&[Batch<N>]) -> Result<()>,
    ) -> Result<()> {
        tch::no_grad(|| memory::scope(MemoryKind::Optimizer, || rule(&self.batches()?)))
    }

    /// All parameters, also those without state.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        self.entries.iter().map(|entry| &entry.parameter)
    }

    /// The names of the slots.
    pub(crate) fn kinds(&self) -> Vec<&'static str> {
        self.slots.iter().map(|slot| slot.name).collect()
    }

    /// All allocated state tensors, by name.
    pub(crate) fn named(&self) -> Vec<(String, Tensor)> {
        let mut named = Vec::new();
        for Entry { parameter, tensors } in &self.entries {
            let tensors = tensors.iter().flatten();
            let tensors = self.slots.iter().zip(tensors);
            named.extend(tensors.map(|(slot, t)| (slot.of(parameter), t.shallow_clone())));
        }
        named
    }

    /// Replaces the state of the parameters that `saved` names.
    pub(crate) fn load(&mut self, saved: Vec<(String, Tensor)>) -> Result<()> {
        let restored = self.restored(saved)?;
        self.replace(restored);
        Ok(())
    }

    /// Saved state as state of these parameters, if it is that.
    pub(crate) fn restored(&self, saved: Vec<(String, Tensor)>) -> Result<Restored> {
        let mut saved: HashMap<String, Tensor> = saved.into_iter().collect();
        let loaded = tch::no_grad(|| {
            memory::scope(MemoryKind::Optimizer, || {
                let entries = self.entries.iter();
                entries
                    .map(|entry| restored_of(&self.slots, &entry.parameter, &mut saved))
                    .collect::<Result<Vec<_>>>()
            })
        })?;
        if let Some(name) = saved.into_keys().min() {
            return Err(OptimError::UnknownState { name });
        }
        Ok(Restored(loaded))
    }

    /// Replaces the state of the parameters that were restored.
    pub(crate) fn replace(&mut self, restored: Restored) {
        for (entry, tensors) in self.entries.iter_mut().zip(restored.0) {
            entry.tensors = tensors.or(entry.tensors.take());
        }
    }

    /// Forgets all state.
    pub(crate) fn clear(&mut self) {
        for entry in &mut self.entries {
            entry.tensors = None;
        }
    }

    /// The number of state tensors with the shape of the parameter.
    pub(crate) fn num_moments(&self) -> u64 {
        let moments = self
            .slots
            .iter()
            .filter(|slot| slot.extent == Extent::Parameter);
        moments.count() as u64
    }

    fn batches(&mut self) -> Result<Vec<Batch<N>>> {
        let mut batches: Vec<Batch<N>> = Vec::new();
        for (entry, Entry { parameter, tensors }) in self.entries.iter_mut().enumerate() {
            let Some(gradient) = parameter.gradient()? else {
                continue;
            };
            let tensors = match tensors {
                Some(tensors) => tensors,
                None => tensors.insert(zeros(&self.slots, parameter)?),
            };
            let kind = parameter.kind();
            let known = batches.iter().position(|batch| batch.kind == kind);
            let index = known.unwrap_or_else(|| {
                batches.push(Batch::new(kind));
                batches.len() - 1
            });
            // Gradients may have been reduced in a narrower dtype than that of the parameters.
            batches[index].push(
                entry,
                parameter.tensor(),
                gradient.f_to_kind(kind)?,
                tensors,
            );
        }
        Ok(batches)
    }
}

impl Slot {
    /// The name of this state tensor of a parameter.
    fn of(&self, parameter: &Parameter) -> String {
        format!("{}.{}", self.name, parameter.name())
    }

    fn zeros(&self, parameter: &Tensor) -> Result<Tensor> {
        Ok(match self.extent {
            Extent::Parameter => parameter.f_zeros_like()?,
            Extent::Scalar => scalar::zero_like(parameter)?,
        })
    }
}

fn zeros(slots: &[Slot], parameter: &Parameter) -> Result<Vec<Tensor>> {
    let tensors = slots.iter().map(|slot| slot.zeros(parameter.tensor()));
    tensors.collect()
}

/// Moves the state tensors of a parameter out of `saved`: all of them, or none.
fn restored_of(
    slots: &[Slot],
    parameter: &Parameter,
    saved: &mut HashMap<String, Tensor>,
) -> Result<Option<Vec<Tensor>>> {
    let names: Vec<String> = slots.iter().map(|slot| slot.of(parameter)).collect();
    if !names.iter().any(|name| saved.contains_key(name)) {
        return Ok(None);
    }
    let mut tensors = zeros(slots, parameter)?;
    for (name, tensor) in names.into_iter().zip(&mut tensors) {
        let Some(source) = saved.remove(&name) else {
            return Err(OptimError::MissingState { name });
        };
        let (expected, found) = (described(tensor)?, described(&source)?);
        if expected != found {
            return Err(OptimError::StateMismatch {
                name,
                expected,
                found,
            });
        }
        tensor.f_copy_(&source)?;
    }
    Ok(Some(tensors))
}

fn described(tensor: &Tensor) -> Result<String> {
    Ok(format!("{:?} {:?}", tensor.f_kind()?, tensor.size()))
}
