//! Adapts a model written with a plain `tch` `VarStore`.
//!
//! The variables stay in the store and keep their names; each belongs to the unit with the longest name that is a
//! prefix of its own.

use std::collections::{BTreeMap, BTreeSet};

use tch::{Tensor, nn::VarStore};

use trainyard_torch::autograd::without_version_bump;

use crate::{Context, Model, Module, NnError, Parameter, Result, Unit, is_recomputing};

/// The forward function of a unit of an adapted model. The context says whether it trains, for dropout and BatchNorm.
pub type UnitFn = Box<dyn Fn(&Tensor, &Context) -> Tensor>;

/// The loss function of an adapted model, of its output and the targets: a sum over targets, not a mean.
pub type LossFn = Box<dyn Fn(&Tensor, &Tensor) -> Tensor>;

/// A `tch` model as a list of units.
///
/// ```no_run
/// # use tch::nn::{self, Module as _};
/// # use trainyard_nn::{UnitFn, VarStoreModel};
/// # fn main() -> trainyard_nn::Result<()> {
/// let vs = nn::VarStore::new(tch::Device::Cpu);
/// let one = nn::linear(vs.root() / "one", 784, 128, Default::default());
/// let two = nn::linear(vs.root() / "two", 128, 10, Default::default());
/// let units: Vec<(&str, UnitFn)> = vec![
///     ("one", Box::new(move |x, cx| one.forward(x).relu().dropout(0.1, cx.training))),
///     ("two", Box::new(move |x, _| two.forward(x))),
/// ];
/// let loss = |output: &tch::Tensor, targets: &tch::Tensor| {
///     trainyard_nn::cross_entropy_sum(output, targets).unwrap()
/// };
/// let model = VarStoreModel::new(&vs, units, Box::new(loss))?;
/// # Ok(())
/// # }
/// ```
#[derive(Module)]
pub struct VarStoreModel {
    units: Vec<AdaptedUnit>,
    #[module(skip)]
    loss: LossFn,
}

#[derive(Module)]
struct AdaptedUnit {
    name: String,
    parameters: Vec<Parameter>,
    #[module(skip)]
    forward: UnitFn,
}

impl VarStoreModel {
    /// Adapts the variables of `vs`, each of which must belong to one of `units`. Units are in order of execution.
    pub fn new(
        vs: &VarStore,
        units: Vec<(impl Into<String>, UnitFn)>,
        loss: LossFn,
    ) -> Result<VarStoreModel> {
        let (names, functions): (Vec<String>, Vec<UnitFn>) = units
            .into_iter()
            .map(|(name, function)| (name.into(), function))
            .unzip();
        check_unique(&names)?;

        // Sorted by name, because the store has no order.
        let variables: BTreeMap<String, Tensor> = vs.variables().into_iter().collect();
        let owners = assign(&names, variables.keys())?;
        // A frozen variable is still among them; what the others are for is unknown.
        let trained: Vec<_> = vs
            .trainable_variables()
            .iter()
            .map(Tensor::data_ptr)
            .collect();
        let mut owned: Vec<Vec<Parameter>> = names.iter().map(|_| Vec::new()).collect();
        for ((name, tensor), owner) in variables.into_iter().zip(owners) {
            let is_trained = trained.contains(&tensor.data_ptr());
            let parameter = Parameter::from_tensor(name, tensor)?;
            owned[owner].push(if is_trained {
                parameter
            } else {
                parameter.into_running_stat()
            });
        }
        let units = names
            .into_iter()
            .zip(owned)
            .zip(functions)
            .map(|((name, parameters), forward)| AdaptedUnit {
                name,
                parameters,
                forward,
            })
            .collect();
        Ok(VarStoreModel { units, loss })
    }
}

impl Model for VarStoreModel {
    fn units(&self) -> Vec<&dyn Unit> {
        self.units.iter().map(|unit| unit as &dyn Unit).collect()
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        Ok((self.loss)(output, targets))
    }
}

impl AdaptedUnit {
    /// The running statistics and copies of them.
    fn running_stats(&self) -> Result<Vec<(&Tensor, Tensor)>> {
        let stats = self.parameters.iter().filter(|p| p.is_running_stat());
        let copied = |stat: &Tensor| stat.f_detach_copy();
        stats
            .map(|stat| Ok((stat.tensor(), copied(stat.tensor())?)))
            .collect()
    }
}

impl Unit for AdaptedUnit {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, cx: &Context) -> Result<Tensor> {
        if !is_recomputing() && !cx.is_idle {
            return Ok((self.forward)(x, cx));
        }
        let kept = self.running_stats()?;
        let output = (self.forward)(x, cx);
        for (stat, kept) in &kept {
            without_version_bump(stat, || stat.shallow_clone().f_copy_(kept))??;
        }
        Ok(output)
    }
}

fn check_unique(names: &[String]) -> Result<()> {
    let mut seen = BTreeSet::new();
    match names.iter().find(|name| !seen.insert(*name)) {
        Some(unit) => Err(NnError::RepeatedUnit { unit: unit.clone() }),
        None => Ok(()),
    }
}

/// The index of the owning unit of every variable.
fn assign<'a>(units: &[String], variables: impl Iterator<Item = &'a String>) -> Result<Vec<usize>> {
    let (mut owners, mut unowned) = (Vec::new(), Vec::new());
    for variable in variables {
        match owner(units, variable) {
            Some(index) => owners.push(index),
            None => unowned.push(variable.clone()),
        }
    }
    if unowned.is_empty() {
        Ok(owners)
    } else {
        Err(NnError::Unowned {
            names: unowned,
            units: units.to_vec(),
        })
    }
}

fn owner(units: &[String], variable: &str) -> Option<usize> {
    let owns = |unit: &str| {
        variable
            .strip_prefix(unit)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    units
        .iter()
        .enumerate()
        .filter(|(_, unit)| owns(unit))
        .max_by_key(|(_, unit)| unit.len())
        .map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| name.to_string()).collect()
    }

    #[test]
    fn the_unit_with_the_longest_matching_name_owns_a_variable() {
        let units = strings(&["block", "block.1", "block.10"]);
        assert_eq!(owner(&units, "block.1.weight"), Some(1));
        assert_eq!(owner(&units, "block.10.weight"), Some(2));
        assert_eq!(owner(&units, "block.2.weight"), Some(0));
        assert_eq!(owner(&units, "block"), Some(0));
        assert_eq!(owner(&units, "blocks.weight"), None);
    }

    #[test]
    fn the_error_names_variables_without_a_unit() {
        let units = strings(&["a"]);
        let error = assign(&units, strings(&["a.x", "b.x", "c"]).iter()).unwrap_err();
        assert!(
            error.to_string().starts_with("no unit owns b.x, c: "),
            "{error}"
        );
    }

    #[test]
    fn repeated_unit_names_are_rejected() {
        assert!(check_unique(&strings(&["a", "b"])).is_ok());
        assert!(check_unique(&strings(&["a", "b", "a"])).is_err());
    }
}
