//! Why replicas in different sites are joined as they are, and the keys that do so.

use trainyard_plan::{Plan, SiteChoice};

use super::table::describe_sites;
use super::{Report, describe};

impl Report {
    /// Why the best plan joins sites by local updates, or in every step.
    pub(super) fn describe_site_choice(&self, choice: &SiteChoice) -> String {
        let sites = self.request.cluster.sites.as_ref();
        let network = sites.map_or_else(String::new, describe_sites);
        let (speedup, required) = (choice.speedup, choice.required_speedup);
        let rejected = describe(&choice.rejected);
        let keys = self.best().and_then(keys);
        match keys {
            Some(keys) => format!(
                "With {network}, replicas that take optimizer steps of their own train {speedup:.1} times as many samples \
                 per second as gradients that are averaged in every step ({rejected}). The planner demands {required:.2} \
                 times as many, because local updates change convergence: compare their loss with that of a synchronous \
                 run before you rely on them. The keys are {keys}."
            ),
            None => format!(
                "With {network}, replicas that take optimizer steps of their own ({rejected}) train {speedup:.2} times as \
                 many samples per second. The planner demands {required:.2} times as many, because local updates change \
                 convergence, so gradients are averaged in every step."
            ),
        }
    }
}

/// The config keys of local updates.
fn keys(plan: &Plan) -> Option<String> {
    let strategy = &plan.strategy;
    let local = strategy.synchronization.local_updates()?;
    let mut keys = vec![
        format!(
            "parallelism.data_parallel_outer_degree = {}",
            strategy.degrees.dp_outer
        ),
        format!("local_updates.method = \"{}\"", local.method.name()),
        format!("local_updates.sync_steps = {}", local.sync_steps),
    ];
    let compression = local.compression.name();
    if compression != "none" {
        keys.push(format!("local_updates.compression = \"{compression}\""));
    }
    Some(keys.join(", "))
}
