//! The answer to a question, for people and for programs: a table, sentences, JSON, a page.
//!
//! All four say the same, because all are made of one [`Report`].

mod dry_run;
mod json;
mod page;
mod table;
mod words;

use crate::explain::lost;
use crate::{
    Degrees, Explanation, Found, Lost, Miss, Plan, Question, explain, model_flops_utilization,
    search, search_mesh,
};

pub use dry_run::{Counted, DryRun, RankBytes};
pub use json::{PlanFile, PlanFileError};
pub use table::Style;
pub use words::{in_words, term};

const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

/// A question, what was found, and why.
#[derive(Clone, Debug)]
pub struct Report {
    /// What was asked.
    pub question: Question,
    /// What was found.
    pub found: Found,
    /// Why the best is the best, or what is missing.
    pub why: Result<Explanation, Option<Box<Miss>>>,
    /// A way that was asked for by name, beside the best.
    pub compared: Option<Compared>,
    /// What the code that would run them says of the first plans, in order, or why it says nothing.
    pub dry_runs: Vec<Result<DryRun, String>>,
}

/// A way that somebody else chose, beside the best.
#[derive(Clone, Debug)]
pub struct Compared {
    /// The difference to the best, term by term.
    pub lost: Lost,
    /// Its place among the plans, from 1; none where it does not fit.
    pub place: Option<usize>,
    /// Bytes that it lacks; negative where it has some to spare.
    pub missing: f64,
}

impl Report {
    /// Searches and explains.
    pub fn of(question: Question) -> Report {
        let found = search(&question);
        let why = explain(&question, &found);
        Report {
            question,
            found,
            why,
            compared: None,
            dry_runs: Vec::new(),
        }
    }

    /// Sets the fastest way with these sizes of axes beside the best. It stays out where nothing fits or
    /// where the sizes cannot be meant.
    pub fn compare_mesh(&mut self, degrees: Degrees) {
        if let Some(plan) = search_mesh(&self.question, degrees) {
            self.compare(plan);
        }
    }

    /// Sets a way beside the best.
    pub fn compare(&mut self, plan: Plan) {
        let Some(best) = self.found.plans.first() else {
            return;
        };
        let missing = self.question.missing(&plan);
        let faster = self.found.plans.iter();
        let faster = faster.filter(|other| {
            other.strategy.degrees != plan.strategy.degrees && other.time.likely < plan.time.likely
        });
        self.compared = Some(Compared {
            place: (missing <= 0.0).then(|| faster.count() + 1),
            lost: lost(best, &plan),
            missing,
        });
    }

    /// The plan that is recommended.
    pub fn best(&self) -> Option<&Plan> {
        self.found.plans.first()
    }

    /// The share of the peak that a plan's model operations are.
    pub fn utilization(&self, plan: &Plan) -> f64 {
        let ranks = plan.strategy.degrees.world_size() as f64;
        let peak = self.question.cluster.accelerator.peak.value * ranks;
        let shape = &self.question.shape;
        model_flops_utilization(shape, &plan.strategy, plan.time.likely, peak)
    }

    /// Tokens per second and rank.
    pub fn tokens_per_second(&self, plan: &Plan) -> f64 {
        let strategy = &plan.strategy;
        let tokens = (strategy.global_batch * strategy.seq_len) as f64;
        tokens / plan.time.likely / strategy.degrees.world_size() as f64
    }
}
