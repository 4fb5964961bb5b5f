//! How busy experts are: told, and balanced by.

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};
use trainyard_config::Config;
use trainyard_mesh::{Axis, AxisSet};
use trainyard_nn::{Model, Router};
use trainyard_torch::{Group, ReduceOp, World};
use trainyard_trace::Purpose;

use crate::error::Result;

/// The load of one layer's experts in a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpertLoad {
    /// The block, from zero.
    pub layer: usize,
    /// Rows each expert was chosen for: a token makes as many as it goes to experts.
    pub rows: Vec<i64>,
    /// How many of all those no expert had room for.
    #[serde(default)]
    pub dropped: i64,
}

impl ExpertLoad {
    /// The share of rows that no expert had room for.
    pub fn dropped_share(&self) -> f64 {
        let sum: i64 = self.rows.iter().sum();
        self.dropped as f64 / sum.max(1) as f64
    }

    /// How many times the mean the largest load is: what others wait for.
    pub fn imbalance(&self) -> f64 {
        let sum: i64 = self.rows.iter().sum();
        let most = self.rows.iter().copied().max().unwrap_or(0);
        match sum {
            0 => 1.0,
            _ => most as f64 * self.rows.len() as f64 / sum as f64,
        }
    }
}

/// The ranks whose loads add up; none where the model has no experts.
pub(crate) struct Loads {
    /// Those of this stage that see different tokens.
    stage: Option<Group>,
    /// Everyone.
    all: Option<Group>,
    num_layers: usize,
    num_experts: usize,
}

impl Loads {
    pub(crate) fn new(model: &dyn Model, world: &World, config: &Config) -> Result<Loads> {
        let spec = config.model.resolve()?;
        let has_bias = routers(model).any(Router::has_bias);
        let tokens = AxisSet::of([Axis::DpReplicate, Axis::DpShard, Axis::Cp, Axis::Tp]);
        Ok(Loads {
            stage: has_bias.then(|| world.group(tokens)).transpose()?,
            all: spec.experts().map(|_| world.everyone()).transpose()?,
            num_layers: spec.decoder().map_or(0, |sizes| sizes.num_hidden_layers),
            num_experts: spec.experts().map_or(0, |experts| experts.num_experts),
        })
    }

    /// Moves the biases of this rank's routers, by the loads of all ranks.
    pub(crate) fn rebalance(&self, model: &dyn Model) -> Result<()> {
        let Some(stage) = &self.stage else {
            return Ok(());
        };
        let mut counted = Vec::new();
        for router in routers(model).filter(|router| router.has_bias()) {
            counted.extend(router.load().of_step()?.map(|rows| (router, rows)));
        }
        if counted.is_empty() {
            return Ok(());
        }
        let rows: Vec<&Tensor> = counted.iter().map(|(_, rows)| rows).collect();
        let all = Tensor::f_stack(&rows, 0)?;
        stage
            .all_reduce(&all, ReduceOp::Sum, Purpose::Control)?
            .wait()?;
        for (index, (router, _)) in counted.iter().enumerate() {
            router.rebalance(&all.f_select(0, index as i64)?)?;
        }
        Ok(())
    }

    /// The loads of all layers in the last step, over all ranks.
    pub(crate) fn of_step(&self, model: &dyn Model) -> Result<Vec<ExpertLoad>> {
        let Some(everyone) = &self.all else {
            return Ok(Vec::new());
        };
        // The last column has what was dropped.
        let shape = [self.num_layers as i64, self.num_experts as i64 + 1];
        let device = model
            .parameters()
            .first()
            .map_or(Device::Cpu, |p| p.tensor().device());
        let all = Tensor::f_zeros(&shape[..], (Kind::Int64, device))?;
        for router in routers(model) {
            let row = all.f_select(0, router.layer() as i64)?;
            let number = self.num_experts as i64;
            if let Some(rows) = router.load().of_step()? {
                row.f_narrow(0, 0, number)?.f_copy_(&rows)?;
            }
            if let Some(dropped) = router.load().dropped_of_step()? {
                row.f_narrow(0, number, 1)?.f_copy_(&dropped)?;
            }
        }
        everyone
            .all_reduce(&all, ReduceOp::Sum, Purpose::Control)?
            .wait()?;
        let mut loads = Vec::new();
        for layer in 0..self.num_layers {
            let mut rows = Vec::<i64>::try_from(all.f_select(0, layer as i64)?)?;
            let dropped = rows.pop().unwrap_or(0);
            if rows.iter().any(|&count| count > 0) {
                loads.push(ExpertLoad {
                    layer,
                    rows,
                    dropped,
                });
            }
        }
        Ok(loads)
    }
}

fn routers(model: &dyn Model) -> impl Iterator<Item = &Router> {
    let units = model.units().into_iter();
    units.filter_map(|unit| unit.router())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_equal_load_is_no_imbalance() {
        let of = |rows: &[i64]| {
            let load = ExpertLoad {
                layer: 0,
                rows: rows.to_vec(),
                dropped: 3,
            };
            assert_eq!(
                load.dropped_share(),
                3.0 / rows.iter().sum::<i64>().max(1) as f64
            );
            load.imbalance()
        };
        assert_eq!(of(&[3, 3, 3]), 1.0);
        assert_eq!(of(&[9, 0, 0]), 3.0);
        assert_eq!(of(&[0, 0]), 1.0);
    }
}
