//! Compares a plan with the run it was made for, term by term, and fits the constants to the run.
//!
//! A run's metrics contain its step time ([`Measured`]). Its traces also show where the time went and how long
//! every collective took ([`TraceBreakdown`]). Each constant is fitted to the measurements it affects: compute
//! constants to compute time, network constants to the collectives. Waiting time is compared but not fitted,
//! because it follows from both.

mod collective_time;
mod component;
mod measured;
mod trace;

use std::borrow::Cow;

use serde_json::{Value, json};

use crate::PlanFile;
use trainyard_plan::fit_to;
use trainyard_plan::{
    Calibration, Cluster, ClusterError, Constants, NetworkModel, Plan, PlanRequest, StrategyError,
    Time, model_flops_utilization, time,
};

pub use collective_time::CollectiveTime;
pub use component::TimeComponent;
pub use measured::{Measured, MeasuredError};
pub use trace::{TraceBreakdown, TraceError};

/// One predicted and measured quantity.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The name of the quantity.
    pub name: Cow<'static, str>,
    /// The prediction.
    pub predicted: f64,
    /// The measurement, if the run has it.
    pub measured: Option<f64>,
    /// The prediction with the fitted constants, if they affect it.
    pub refitted: Option<f64>,
}

impl Row {
    /// Measured over predicted.
    pub fn ratio(&self) -> Option<f64> {
        let ratio = self.measured? / self.predicted;
        ratio.is_finite().then_some(ratio)
    }

    /// Measured minus predicted.
    pub fn difference(&self) -> Option<f64> {
        Some(self.measured? - self.predicted)
    }

    fn to_json(&self) -> Value {
        json!({
            "name": self.name,
            "predicted": self.predicted,
            "measured": self.measured,
            "ratio": self.ratio(),
            "difference": self.difference(),
            "refitted": self.refitted,
        })
    }
}

/// A plan compared with its run.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Step time, peak memory, throughput and MFU.
    pub summary: Vec<Row>,
    /// Seconds by component. The measured ones sum to the step.
    pub terms: Vec<Row>,
    /// Seconds of collectives by axes, kind and size.
    pub collectives: Vec<Row>,
    /// The plan's constants.
    pub before: Constants,
    /// The constants fitted to the run.
    pub constants: Constants,
    /// The plan estimated with the fitted constants.
    pub refitted: Plan,
}

impl Comparison {
    /// Compares a plan with its run and fits the constants.
    pub fn of(
        file: &PlanFile,
        measured: &Measured,
        traced: Option<&TraceBreakdown>,
    ) -> Result<Comparison, StrategyError> {
        let PlanFile { request, plan } = file;
        let run = RunData {
            request,
            plan,
            measured,
            traced,
        };
        let before = request.calibration.constants;
        let constants = fit_to(&|at| run.errors(at), &before, &Constants::prior_stds());
        let mut after = request.clone();
        after.calibration.constants = constants;
        let refitted = after.estimate(&plan.strategy)?;
        Ok(Comparison {
            summary: run.summary(&refitted),
            terms: run.terms(&refitted.time),
            collectives: run.collectives(&constants),
            before,
            constants,
            refitted,
        })
    }

    /// The constants that the fit changed by more than half a percent: name, before, after.
    pub fn moved(&self) -> Vec<(&'static str, f64, f64)> {
        let values = self.before.to_array().into_iter();
        let values = values.zip(self.constants.to_array());
        let named = Constants::names().into_iter().zip(values);
        named
            .map(|(name, (before, after))| (name, before, after))
            .filter(|(_, before, after)| (after / before).ln().abs() > 0.005)
            .collect()
    }

    /// The comparison as JSON.
    pub fn to_json(&self) -> Value {
        let rows = |rows: &[Row]| rows.iter().map(Row::to_json).collect::<Vec<_>>();
        let moved = self.moved().into_iter();
        let moved = moved.map(
            |(name, before, after)| json!({ "name": name, "before": before, "refitted": after }),
        );
        json!({
            "summary": rows(&self.summary),
            "terms": rows(&self.terms),
            "collectives": rows(&self.collectives),
            "constants": moved.collect::<Vec<_>>(),
        })
    }
}

/// A cluster with these constants, to be written as a cluster file.
pub fn with_constants(cluster: &Cluster, constants: &Constants) -> Result<Cluster, ClusterError> {
    let mut pairs = Constants::names().into_iter().zip(constants.to_array());
    pairs.try_fold(cluster.clone(), |cluster, (name, value)| {
        cluster.with_constant(name, value)
    })
}

/// A plan and everything measured of its run.
struct RunData<'a> {
    request: &'a PlanRequest,
    plan: &'a Plan,
    measured: &'a Measured,
    traced: Option<&'a TraceBreakdown>,
}

impl RunData<'_> {
    /// Logarithms of predicted over measured values.
    fn errors(&self, constants: &Constants) -> Vec<f64> {
        let time = self.time(constants);
        let Some(traced) = self.traced else {
            return vec![(time.likely / self.measured.seconds).ln()];
        };
        let fitted = [TimeComponent::Compute, TimeComponent::Optimizer].into_iter();
        let components =
            fitted.map(|component| component.predicted(&time) / traced.seconds(component));
        let network = self.network(constants);
        let collectives = traced
            .collectives
            .iter()
            .map(|collective| collective.predicted(&network) / collective.seconds);
        let errors = components.chain(collectives).map(f64::ln);
        // A component without predicted or measured time says nothing.
        let errors = errors.map(|error| if error.is_finite() { error } else { 0.0 });
        errors.collect()
    }

    fn time(&self, constants: &Constants) -> Time {
        let calibration = Calibration {
            constants: *constants,
            ..self.request.calibration.clone()
        };
        let (shape, cluster) = (&self.request.shape, &self.request.cluster);
        time(shape, &self.plan.strategy, cluster, &calibration)
    }

    fn network<'a>(&'a self, constants: &'a Constants) -> NetworkModel<'a> {
        NetworkModel {
            cluster: &self.request.cluster,
            constants,
        }
    }

    fn summary(&self, refitted: &Plan) -> Vec<Row> {
        let measured = self.measured;
        let step = |of: &dyn Fn(&Time) -> f64| (of(&self.plan.time), Some(of(&refitted.time)));
        let bytes = (self.plan.memory.total(), None);
        let rows = [
            (
                "step time, seconds",
                step(&|time| time.likely),
                Some(measured.seconds),
            ),
            ("peak memory, bytes", bytes, measured.peak_bytes),
            (
                "tokens/s/rank",
                step(&|time| self.tokens_per_second(time)),
                measured.tokens_per_second,
            ),
            ("MFU", step(&|time| self.utilization(time)), measured.mfu),
        ];
        let rows = rows.map(|(name, (predicted, refitted), measured)| Row {
            name: name.into(),
            predicted,
            measured,
            refitted,
        });
        rows.into()
    }

    fn tokens_per_second(&self, time: &Time) -> f64 {
        let strategy = &self.plan.strategy;
        let tokens = (strategy.global_batch * strategy.seq_len) as f64;
        tokens / time.likely / strategy.degrees.world_size() as f64
    }

    fn utilization(&self, time: &Time) -> f64 {
        let strategy = &self.plan.strategy;
        let ranks = strategy.degrees.world_size() as f64;
        let peak = self.request.cluster.accelerator.peak.value * ranks;
        model_flops_utilization(&self.request.shape, strategy, time.likely, peak)
    }

    fn terms(&self, refitted: &Time) -> Vec<Row> {
        let rows = TimeComponent::ALL.into_iter().map(|component| Row {
            name: component.description().into(),
            predicted: component.predicted(&self.plan.time),
            measured: self.traced.and_then(|traced| {
                if component.is_traced() {
                    Some(traced.seconds(component))
                } else {
                    None
                }
            }),
            refitted: Some(component.predicted(refitted)),
        });
        let is_there = |row: &Row| row.predicted > 0.0 || row.measured.is_some_and(|s| s > 0.0);
        rows.filter(is_there).collect()
    }

    fn collectives(&self, constants: &Constants) -> Vec<Row> {
        let before = self.network(&self.request.calibration.constants);
        let after = self.network(constants);
        let measured = self.traced.iter().flat_map(|traced| &traced.collectives);
        let rows = measured.map(|collective| Row {
            name: collective.to_string().into(),
            predicted: collective.predicted(&before),
            measured: Some(collective.seconds),
            refitted: Some(collective.predicted(&after)),
        });
        rows.collect()
    }
}

#[cfg(test)]
mod tests;
