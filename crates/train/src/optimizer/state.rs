//! The tensors an optimiser keeps beside each parameter.
//!
//! They are made when the parameter first has a gradient, so that what is never trained costs
//! nothing, and from the parameter itself, so that they live where it lives.

use std::collections::HashMap;

use tch::Tensor;
use trainyard_nn::Parameter;
use trainyard_torch::memory;
use trainyard_trace::MemoryKind;

use super::batch::Batch;
use crate::zero::zero_at;
use crate::{Result, TrainError};

/// One kind of state.
#[derive(Copy, Clone)]
pub(super) struct Slot {
    /// Its name in checkpoints, before the parameter's.
    pub(super) name: &'static str,
    /// How large it is.
    pub(super) extent: Extent,
}

#[derive(Copy, Clone)]
pub(super) enum Extent {
    /// Shape and kind of the parameter.
    Parameter,
    /// One number in single precision.
    Scalar,
}

/// Parameters with `N` tensors of state each.
pub(super) struct State<const N: usize> {
    slots: [Slot; N],
    entries: Vec<Entry>,
}

struct Entry {
    parameter: Parameter,
    /// One tensor per slot, once there was a gradient.
    held: Option<Vec<Tensor>>,
}

impl<const N: usize> State<N> {
    pub(super) fn new(slots: [Slot; N], parameters: Vec<Parameter>) -> State<N> {
        let entries = parameters.into_iter().map(|parameter| Entry {
            parameter,
            held: None,
        });
        State {
            slots,
            entries: entries.collect(),
        }
    }

    /// Applies `rule` to all parameters that have a gradient, kind by kind.
    pub(super) fn update(&mut self, rule: impl Fn(&Batch<N>) -> Result<()>) -> Result<()> {
        tch::no_grad(|| {
            memory::scope(MemoryKind::Optimizer, || {
                self.batches()?.iter().try_for_each(rule)
            })
        })
    }

    /// The names of the slots.
    pub(super) fn kinds(&self) -> Vec<&'static str> {
        self.slots.iter().map(|slot| slot.name).collect()
    }

    /// Every tensor there is, by name.
    pub(super) fn named(&self) -> Vec<(String, Tensor)> {
        let mut named = Vec::new();
        for Entry { parameter, held } in &self.entries {
            let held = held.iter().flatten();
            let tensors = self.slots.iter().zip(held);
            named.extend(tensors.map(|(slot, t)| (slot.of(parameter), t.shallow_clone())));
        }
        named
    }

    /// Replaces everything by what was saved.
    pub(super) fn load(&mut self, saved: Vec<(String, Tensor)>) -> Result<()> {
        let mut saved: HashMap<String, Tensor> = saved.into_iter().collect();
        let loaded = tch::no_grad(|| {
            memory::scope(MemoryKind::Optimizer, || {
                let entries = self.entries.iter();
                entries
                    .map(|entry| restored(&self.slots, &entry.parameter, &mut saved))
                    .collect::<Result<Vec<_>>>()
            })
        })?;
        if let Some(name) = saved.into_keys().min() {
            return Err(TrainError::UnknownState { name });
        }
        for (entry, held) in self.entries.iter_mut().zip(loaded) {
            entry.held = held;
        }
        Ok(())
    }

    fn batches(&mut self) -> Result<Vec<Batch<N>>> {
        let mut batches: Vec<Batch<N>> = Vec::new();
        for Entry { parameter, held } in &mut self.entries {
            let Some(gradient) = parameter.gradient()? else {
                continue;
            };
            let held = match held {
                Some(held) => held,
                None => held.insert(zeros(&self.slots, parameter)?),
            };
            let kind = parameter.kind();
            let known = batches.iter().position(|batch| batch.kind == kind);
            let index = known.unwrap_or_else(|| {
                batches.push(Batch::new(kind));
                batches.len() - 1
            });
            // Gradients may have travelled in a narrower type than the optimiser works in.
            batches[index].push(parameter.tensor(), gradient.f_to_kind(kind)?, held);
        }
        Ok(batches)
    }
}

impl Slot {
    /// The name of this state of a parameter.
    fn of(&self, parameter: &Parameter) -> String {
        format!("{}.{}", self.name, parameter.name())
    }

    fn zeros(&self, parameter: &Tensor) -> Result<Tensor> {
        Ok(match self.extent {
            Extent::Parameter => parameter.f_zeros_like()?,
            Extent::Scalar => zero_at(parameter)?,
        })
    }
}

fn zeros(slots: &[Slot], parameter: &Parameter) -> Result<Vec<Tensor>> {
    let tensors = slots.iter().map(|slot| slot.zeros(parameter.tensor()));
    tensors.collect()
}

/// Takes a parameter's state out of `saved`: all of it, or none.
fn restored(
    slots: &[Slot],
    parameter: &Parameter,
    saved: &mut HashMap<String, Tensor>,
) -> Result<Option<Vec<Tensor>>> {
    let names: Vec<String> = slots.iter().map(|slot| slot.of(parameter)).collect();
    if !names.iter().any(|name| saved.contains_key(name)) {
        return Ok(None);
    }
    let mut held = zeros(slots, parameter)?;
    for (name, tensor) in names.into_iter().zip(&mut held) {
        let Some(source) = saved.remove(&name) else {
            return Err(TrainError::MissingState { name });
        };
        let (expected, found) = (described(tensor)?, described(&source)?);
        if expected != found {
            return Err(TrainError::StateMismatch {
                name,
                expected,
                found,
            });
        }
        tensor.f_copy_(&source)?;
    }
    Ok(Some(held))
}

fn described(tensor: &Tensor) -> Result<String> {
    Ok(format!("{:?} {:?}", tensor.f_kind()?, tensor.size()))
}
