//! Expert load: tokens routed to each expert, for metrics and for load balancing.

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};
use trainyard_config::Config;
use trainyard_mesh::{Axis, AxisSet};
use trainyard_nn::{Model, Router};
use trainyard_torch::{Group, ReduceOp, World};
use trainyard_trace::Purpose;

use crate::error::Result;

/// The load of the experts of one layer in a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpertLoad {
    /// Index of the transformer block, from zero.
    pub layer: usize,
    /// Rows routed to each expert. A token contributes one row per expert it is routed to.
    pub rows: Vec<i64>,
    /// Rows that were dropped because the expert was at capacity.
    #[serde(default)]
    pub dropped: i64,
}

impl ExpertLoad {
    /// Dropped rows as a fraction of all rows.
    pub fn dropped_share(&self) -> f64 {
        let sum: i64 = self.rows.iter().sum();
        self.dropped as f64 / sum.max(1) as f64
    }

    /// The largest load divided by the mean load. The other experts wait for the busiest one.
    pub fn imbalance(&self) -> f64 {
        let sum: i64 = self.rows.iter().sum();
        let largest = self.rows.iter().copied().max().unwrap_or(0);
        match sum {
            0 => 1.0,
            _ => largest as f64 * self.rows.len() as f64 / sum as f64,
        }
    }
}

/// Sums expert loads over ranks; does nothing for a model without experts.
pub(crate) struct ExpertLoadTracker {
    /// Ranks of this pipeline stage that process different tokens; set if routers have a bias.
    stage_group: Option<Group>,
    /// All ranks; set if the model has experts.
    world_group: Option<Group>,
    num_layers: usize,
    num_experts: usize,
}

impl ExpertLoadTracker {
    pub(crate) fn new(
        model: &dyn Model,
        world: &World,
        config: &Config,
    ) -> Result<ExpertLoadTracker> {
        let spec = config.model.resolve()?;
        let has_bias = routers(model).any(Router::has_bias);
        let tokens = AxisSet::of([Axis::DpReplicate, Axis::DpShard, Axis::Cp, Axis::Tp]);
        Ok(ExpertLoadTracker {
            stage_group: has_bias.then(|| world.group(tokens)).transpose()?,
            world_group: spec.experts().map(|_| world.world_group()).transpose()?,
            num_layers: spec.decoder().map_or(0, |sizes| sizes.num_hidden_layers),
            num_experts: spec.experts().map_or(0, |experts| experts.num_experts),
        })
    }

    /// Updates the router biases of this rank from the loads of all ranks (auxiliary-loss-free balancing), unless
    /// `found_inf` is 1.
    pub(crate) fn rebalance(&self, model: &dyn Model, found_inf: Option<&Tensor>) -> Result<()> {
        let Some(stage) = &self.stage_group else {
            return Ok(());
        };
        let mut counted = Vec::new();
        for router in routers(model).filter(|router| router.has_bias()) {
            counted.extend(router.load().step_counts()?.map(|rows| (router, rows)));
        }
        if counted.is_empty() {
            return Ok(());
        }
        let rows: Vec<&Tensor> = counted.iter().map(|(_, rows)| rows).collect();
        let all = Tensor::f_stack(&rows, 0)?;
        stage
            .all_reduce(&all, ReduceOp::Sum, Purpose::Control)?
            .wait()?;
        // A bias does not change if all experts have the same load.
        let all = match found_inf {
            Some(found_inf) => all.f_mul(&found_inf.f_eq(0.0)?.f_to_kind(all.kind())?)?,
            None => all,
        };
        for (index, (router, _)) in counted.iter().enumerate() {
            router.update_bias(&all.f_select(0, index as i64)?)?;
        }
        Ok(())
    }

    /// The loads of all layers in the last step, summed over all ranks. This is a collective call.
    pub(crate) fn step_loads(&self, model: &dyn Model) -> Result<Vec<ExpertLoad>> {
        let Some(world_group) = &self.world_group else {
            return Ok(Vec::new());
        };
        // The last column counts dropped rows.
        let shape = [self.num_layers as i64, self.num_experts as i64 + 1];
        let device = model
            .parameters()
            .first()
            .map_or(Device::Cpu, |p| p.tensor().device());
        let all = Tensor::f_zeros(&shape[..], (Kind::Int64, device))?;
        for router in routers(model) {
            let row = all.f_select(0, router.layer() as i64)?;
            let number = self.num_experts as i64;
            if let Some(rows) = router.load().step_counts()? {
                row.f_narrow(0, 0, number)?.f_copy_(&rows)?;
            }
            if let Some(dropped) = router.load().step_dropped()? {
                row.f_narrow(0, number, 1)?.f_copy_(&dropped)?;
            }
        }
        world_group
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
    fn imbalance_of_an_equal_load_is_one() {
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
