//! A plan beside the run it was made for, term by term, and the constants that explain the difference.
//!
//! A run's metrics have the seconds of a step ([`Measured`]). Its trace has more ([`Traced`]): where those
//! seconds went, and how long every collective took. Each constant is fitted to what speaks about it: those
//! of computing to what was computed, those of wires to the collectives themselves. Waiting is compared and
//! not fitted, because it follows from both.

mod measured;
mod part;
mod traced;
mod wire;

use std::borrow::Cow;

use serde_json::{Value, json};

use crate::fit::fit_to;
use crate::report::PlanFile;
use crate::{
    Calibration, Cluster, ClusterError, Constants, Plan, Question, StrategyError, Time, Wires,
    model_flops_utilization, time,
};

pub use measured::{Measured, MeasuredError};
pub use part::Part;
pub use traced::{Traced, TracedError};
pub use wire::WireTime;

/// A figure of the step, as it was predicted and as it was.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// What it is.
    pub name: Cow<'static, str>,
    /// What was said beforehand.
    pub predicted: f64,
    /// What was seen; none where the run does not say.
    pub measured: Option<f64>,
    /// What the fitted constants say; none where they say nothing about it.
    pub refitted: Option<f64>,
}

impl Row {
    /// Measured over predicted.
    pub fn ratio(&self) -> Option<f64> {
        let ratio = self.measured? / self.predicted;
        ratio.is_finite().then_some(ratio)
    }

    /// Measured less predicted.
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

/// A plan, its run, and what explains the run.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Seconds, bytes, tokens and the share of the peak.
    pub whole: Vec<Row>,
    /// Seconds by what they were spent on. Those of the run sum to its step.
    pub terms: Vec<Row>,
    /// Seconds of collectives by axes, kind and size.
    pub wires: Vec<Row>,
    /// The constants of the plan.
    pub before: Constants,
    /// The constants that explain the run.
    pub constants: Constants,
    /// The plan as those price it.
    pub refitted: Plan,
}

impl Comparison {
    /// Compares and fits.
    pub fn of(
        file: &PlanFile,
        measured: &Measured,
        traced: Option<&Traced>,
    ) -> Result<Comparison, StrategyError> {
        let PlanFile { question, plan } = file;
        let seen = Seen {
            question,
            plan,
            measured,
            traced,
        };
        let before = question.calibration.constants;
        let constants = fit_to(&|at| seen.errors(at), &before, &Constants::doubts());
        let mut after = question.clone();
        after.calibration.constants = constants;
        let refitted = after.price(&plan.strategy)?;
        Ok(Comparison {
            whole: seen.whole(&refitted),
            terms: seen.terms(&refitted.time),
            wires: seen.wires(&constants),
            before,
            constants,
            refitted,
        })
    }

    /// The constants that the run moved by more than half a percent: name, before, after.
    pub fn moved(&self) -> Vec<(&'static str, f64, f64)> {
        let values = self.before.to_array().into_iter();
        let values = values.zip(self.constants.to_array());
        let named = Constants::names().into_iter().zip(values);
        named
            .map(|(name, (before, after))| (name, before, after))
            .filter(|(_, before, after)| (after / before).ln().abs() > 0.005)
            .collect()
    }

    /// The same for programs.
    pub fn to_json(&self) -> Value {
        let rows = |rows: &[Row]| rows.iter().map(Row::to_json).collect::<Vec<_>>();
        let moved = self.moved().into_iter();
        let moved = moved.map(
            |(name, before, after)| json!({ "name": name, "before": before, "refitted": after }),
        );
        json!({
            "whole": rows(&self.whole),
            "terms": rows(&self.terms),
            "collectives": rows(&self.wires),
            "constants": moved.collect::<Vec<_>>(),
        })
    }
}

/// The cluster with these constants stated.
pub fn with_constants(cluster: &Cluster, constants: &Constants) -> Result<Cluster, ClusterError> {
    let mut pairs = Constants::names().into_iter().zip(constants.to_array());
    pairs.try_fold(cluster.clone(), |cluster, (name, value)| {
        cluster.with_constant(name, value)
    })
}

/// All that is compared.
struct Seen<'a> {
    question: &'a Question,
    plan: &'a Plan,
    measured: &'a Measured,
    traced: Option<&'a Traced>,
}

impl Seen<'_> {
    /// How far constants are from what was measured, in powers of e.
    fn errors(&self, constants: &Constants) -> Vec<f64> {
        let time = self.time(constants);
        let Some(traced) = self.traced else {
            return vec![(time.likely / self.measured.seconds).ln()];
        };
        let fitted = [Part::Computing, Part::Optimizer].into_iter();
        let parts = fitted.map(|part| part.predicted(&time) / traced.seconds(part));
        let wires = self.priced(constants);
        let wires = traced
            .wires
            .iter()
            .map(|wire| wire.predicted(&wires) / wire.seconds);
        let errors = parts.chain(wires).map(f64::ln);
        // What took no time, or was not expected to, says nothing.
        let errors = errors.map(|error| if error.is_finite() { error } else { 0.0 });
        errors.collect()
    }

    fn time(&self, constants: &Constants) -> Time {
        let calibration = Calibration {
            constants: *constants,
            ..self.question.calibration.clone()
        };
        let (shape, cluster) = (&self.question.shape, &self.question.cluster);
        time(shape, &self.plan.strategy, cluster, &calibration)
    }

    fn priced<'a>(&'a self, constants: &'a Constants) -> Wires<'a> {
        Wires {
            cluster: &self.question.cluster,
            constants,
        }
    }

    fn whole(&self, refitted: &Plan) -> Vec<Row> {
        let measured = self.measured;
        let step = |of: &dyn Fn(&Time) -> f64| (of(&self.plan.time), Some(of(&refitted.time)));
        let bytes = (self.plan.memory.total(), None);
        let rows = [
            (
                "step, seconds",
                step(&|time| time.likely),
                Some(measured.seconds),
            ),
            ("peak, bytes", bytes, measured.peak_bytes),
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
        let peak = self.question.cluster.accelerator.peak.value * ranks;
        model_flops_utilization(&self.question.shape, strategy, time.likely, peak)
    }

    fn terms(&self, refitted: &Time) -> Vec<Row> {
        let rows = Part::ALL.into_iter().map(|part| Row {
            name: part.words().into(),
            predicted: part.predicted(&self.plan.time),
            measured: self.traced.and_then(|traced| match part.is_traced() {
                true => Some(traced.seconds(part)),
                false => None,
            }),
            refitted: Some(part.predicted(refitted)),
        });
        let is_there = |row: &Row| row.predicted > 0.0 || row.measured.is_some_and(|s| s > 0.0);
        rows.filter(is_there).collect()
    }

    fn wires(&self, constants: &Constants) -> Vec<Row> {
        let before = self.priced(&self.question.calibration.constants);
        let after = self.priced(constants);
        let seen = self.traced.iter().flat_map(|traced| &traced.wires);
        let rows = seen.map(|wire| Row {
            name: wire.to_string().into(),
            predicted: wire.predicted(&before),
            measured: Some(wire.seconds),
            refitted: Some(wire.predicted(&after)),
        });
        rows.collect()
    }
}

#[cfg(test)]
mod tests;
