//! Reports of a search for people and for programs: a table, sentences, JSON and an HTML page.
//!
//! All forms are generated from one [`Report`], so they agree.

mod any_model;
pub mod compare;
mod dry_run;
mod json;
mod page;
mod prose;
mod sites;
mod slow_network;
mod table;

use trainyard_plan::diff;
use trainyard_plan::{
    Degrees, Explanation, MethodTable, NearestMiss, Plan, PlanDiff, PlanRequest, SearchResult,
    explain, model_flops_utilization, search, search_mesh,
};

pub use any_model::AnyModelReport;
pub use dry_run::{AllocatorBytes, ByteCounts, DryRun, RankBytes, dry_run_json, dry_run_table};
pub use json::{PlanFile, PlanFileError};
pub use prose::{describe, describe_term};
pub use table::Style;

const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

/// A request, the result of its search, and the explanation.
#[derive(Clone, Debug)]
pub struct Report {
    /// The request.
    pub request: PlanRequest,
    /// The result of the search.
    pub result: SearchResult,
    /// Why the best plan won, or what is missing if nothing fits.
    pub explanation: Result<Explanation, Option<Box<NearestMiss>>>,
    /// A given plan compared with the best one.
    pub compared: Option<Compared>,
    /// From which bandwidth on methods for slow networks pay, if that was asked for.
    pub slow_network: Vec<MethodTable>,
    /// Dry runs of the best plans, in order, or why a plan cannot be run.
    pub dry_runs: Vec<Result<DryRun, String>>,
}

/// A given plan compared with the best one.
#[derive(Clone, Debug)]
pub struct Compared {
    /// The difference to the best plan, term by term.
    pub diff: PlanDiff,
    /// Its position in the ranking of meshes, from 1; `None` if it does not fit.
    pub position: Option<usize>,
    /// Bytes by which its peak memory exceeds the accelerator; negative if there is memory to spare.
    pub shortfall: f64,
}

impl Report {
    /// Searches and explains the result.
    pub fn of(request: PlanRequest) -> Report {
        let result = search(&request);
        let explanation = explain(&request, &result);
        Report {
            request,
            result,
            explanation,
            compared: None,
            slow_network: Vec::new(),
            dry_runs: Vec::new(),
        }
    }

    /// Compares the fastest plan of a mesh with the best plan. Does nothing if no plan fits or the mesh is
    /// infeasible.
    pub fn compare_mesh(&mut self, degrees: Degrees) {
        if let Some(plan) = search_mesh(&self.request, degrees) {
            self.compare(plan);
        }
    }

    /// Compares a plan with the best plan. Does nothing if no plan fits.
    pub fn compare(&mut self, plan: Plan) {
        let Some(best) = self.result.plans.first() else {
            return;
        };
        let shortfall = self.request.shortfall(&plan);
        let faster = self.result.plans.iter();
        let faster = faster.filter(|other| {
            other.strategy.degrees != plan.strategy.degrees && other.time.likely < plan.time.likely
        });
        self.compared = Some(Compared {
            position: (shortfall <= 0.0).then(|| faster.count() + 1),
            diff: diff(best, &plan),
            shortfall,
        });
    }

    /// The recommended plan.
    pub fn best(&self) -> Option<&Plan> {
        self.result.plans.first()
    }

    /// A plan's model FLOPs utilization (MFU).
    pub fn utilization(&self, plan: &Plan) -> f64 {
        let ranks = plan.strategy.degrees.world_size() as f64;
        let peak = self.request.cluster.accelerator.peak.value * ranks;
        let shape = &self.request.shape;
        model_flops_utilization(shape, &plan.strategy, plan.time.likely, peak)
    }

    /// A plan's throughput in tokens per second per rank.
    pub fn tokens_per_second(&self, plan: &Plan) -> f64 {
        let strategy = &plan.strategy;
        let tokens = (strategy.global_batch * strategy.seq_len) as f64;
        tokens / plan.time.likely / strategy.degrees.world_size() as f64
    }
}
