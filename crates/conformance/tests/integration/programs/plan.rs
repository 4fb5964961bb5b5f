//! `plan` of a model that no formula describes: what it counts is what a dry run and a job have.

use libtest_mimic::Failed;
use serde_json::Value;
use trainyard_conformance::programs::{find, json, run};

use super::trainyard;

const PLAN: &str =
    "plan --model configs/cnn.toml --cluster 2xH100 --global-batch 16 --json --top 100";

/// Every plan's memory is that of a dry run with its keys, and real ranks train the best and the slowest.
pub fn any_model_is_planned_by_dry_runs() -> Result<(), Failed> {
    let found: Value = json(&run(&mut trainyard(PLAN)?)?)?;
    let plans = found["plans"].as_array().ok_or("there are no plans")?;
    for (axis, zero_stage) in [("dp_replicate", 0), ("dp_shard", 3), ("pp", 0), ("tp", 0)] {
        let is_tried = |plan: &&Value| plan["mesh"][axis] == 2 && plan["zero_stage"] == zero_stage;
        assert!(
            plans.iter().any(|plan| is_tried(&plan)),
            "{axis}: {found:#}"
        );
    }
    for plan in plans {
        let line = format!("dry-run configs/cnn.toml --world 2 --json {}", keys(plan));
        let counted: Value = json(&run(&mut trainyard(&line)?)?)?;
        assert_eq!(
            counted["peak_bytes"], plan["ranks"][0]["peak_bytes"],
            "{line}"
        );
        assert_eq!(counted["flops"], plan["ranks"][0]["flops"], "{line}");
    }
    let folder = tempfile::tempdir()?;
    for plan in plans.first().into_iter().chain(plans.last()) {
        let program = find("trainyard")?;
        let line = format!(
            "run --standalone --nproc-per-node 2 -- {} train configs/cnn.toml --training.steps 2 \
             --job.dump_folder {} {}",
            program.display(),
            folder.path().display(),
            keys(plan)
        );
        run(&mut trainyard(&line)?)?;
    }
    Ok(())
}

fn keys(plan: &Value) -> String {
    let keys = plan["overrides"].as_array().into_iter().flatten();
    let keys: Vec<&str> = keys.filter_map(Value::as_str).collect();
    keys.join(" ")
}
