//! `parallelism = "auto"`: the planner's choice, said in the keys it takes the place of.
//!
//! Every rank asks for itself. The answer follows from the config and the number of ranks alone, so all get
//! the same one.

use trainyard_config::{Config, ModelSpec};
use trainyard_plan::{Framework, Shape};

use super::plan::question::{cluster, question};
use crate::failure::Failure;

/// The arguments that say what the planner chose; none unless the config leaves it to the planner.
pub(super) fn choice(config: &Config, world: usize) -> Result<Vec<String>, Failure> {
    if !config.parallelism.auto {
        return Ok(Vec::new());
    }
    let planned = planned(config, world)?;
    let chosen = Config::parse(&planned, &[]).map_err(Failure::new)?;
    let p = &chosen.parallelism;
    let mut arguments = Vec::new();
    let mut say = |key: &str, value: String| arguments.extend([format!("--{key}"), value]);
    say("parallelism.auto", "false".to_owned());
    for (key, degree) in [
        (
            "data_parallel_replicate_degree",
            p.data_parallel_replicate_degree,
        ),
        ("data_parallel_shard_degree", p.data_parallel_shard_degree),
        ("tensor_parallel_degree", p.tensor_parallel_degree),
        ("context_parallel_degree", p.context_parallel_degree),
        ("pipeline_parallel_degree", p.pipeline_parallel_degree),
        ("zero_stage", p.zero_stage as i64),
        (
            "pipeline_parallel_stages_per_rank",
            p.pipeline_parallel_stages_per_rank as i64,
        ),
    ] {
        say(&format!("parallelism.{key}"), degree.to_string());
    }
    say(
        "parallelism.enable_sequence_parallel",
        p.enable_sequence_parallel.to_string(),
    );
    say(
        "parallelism.pipeline_parallel_schedule",
        p.pipeline_parallel_schedule.clone(),
    );
    if let Some(points) = &p.pipeline_parallel_split_points {
        say("parallelism.pipeline_parallel_split_points", points.clone());
    }
    say(
        "training.local_batch_size",
        chosen.training.local_batch_size.to_string(),
    );
    let global = chosen.training.global_batch_size;
    say(
        "training.global_batch_size",
        global.unwrap_or(1).to_string(),
    );
    let mode = match chosen.activation_checkpoint.mode {
        trainyard_config::ActivationCheckpointMode::Full => "full",
        trainyard_config::ActivationCheckpointMode::Selective => "selective",
        _ => "none",
    };
    say("activation_checkpoint.mode", mode.to_owned());
    Ok(arguments)
}

/// The best plan as a config of ours.
fn planned(config: &Config, world: usize) -> Result<String, Failure> {
    let Some(name) = &config.job.cluster else {
        return Err(
            Failure::new("parallelism = \"auto\" does not say for which machines")
                .hint("set job.cluster, as in job.cluster = \"64xH100\""),
        );
    };
    let cluster = cluster(name)?;
    if cluster.world_size() != world {
        return Err(Failure::new(format!(
            "job.cluster = {name:?} has {} ranks, but the job has {world}",
            cluster.world_size()
        ))
        .hint("name the machines that the job runs on, or start as many ranks"));
    }
    let ModelSpec::Llama(model) = config.model.resolve().map_err(Failure::new)? else {
        return Err(
            Failure::new("parallelism = \"auto\" plans for Llamas alone")
                .hint("use model.name = \"llama\", or give the degrees"),
        );
    };
    let shape = Shape::from(&model);
    let training = &config.training;
    let global = training.global_batch_size;
    let global = global.unwrap_or(training.local_batch_size * world);
    let held = training.dtype.size();
    let precision = trainyard_plan::Precision {
        compute: training.compute_dtype().size(),
        parameter: held,
        gradient: held,
        optimizer: 2 * held,
    };
    let question = question(shape, cluster, global, training.seq_len, precision);
    let found = trainyard_plan::search(&question);
    let Some(best) = found.plans.first() else {
        return Err(
            Failure::new(format!("the planner found nothing that fits {name}"))
                .hint("`trainyard plan` says what is missing"),
        );
    };
    let written = Framework::Trainyard.write(&question.shape, &best.strategy, world);
    Ok(written.map_err(Failure::new)?.text)
}

/// How many ranks the launcher says there are; one without a launcher.
pub(super) fn world_size() -> usize {
    let named = std::env::var("WORLD_SIZE").ok();
    named.and_then(|text| text.parse().ok()).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice_of(text: &str, world: usize) -> Result<Vec<String>, String> {
        let config = Config::parse(text, &[]).unwrap();
        choice(&config, world).map_err(|failure| failure.to_string())
    }

    const JOB: &str = "parallelism = \"auto\"\n[job]\ncluster = \"16xH100\"\n[model]\n\
        flavor = \"llama3-8b\"\n[training]\nseq_len = 8192\nglobal_batch_size = 64\n\
        mixed_precision_param = \"bfloat16\"\n";

    #[test]
    fn the_choice_is_a_config_of_all_ranks() {
        let arguments = choice_of(JOB, 16).unwrap();
        let config = Config::parse(JOB, &arguments).unwrap();
        assert!(!config.parallelism.auto);
        assert_eq!(config.mesh(16).unwrap().world_size(), 16);
        assert_eq!(config.training.global_batch_size, Some(64));
    }

    #[test]
    fn nothing_is_chosen_for_other_machines_or_unasked() {
        assert!(choice_of(JOB, 8).unwrap_err().contains("16 ranks"));
        assert_eq!(
            choice_of("[parallelism]\nzero_stage = 1\n", 8),
            Ok(Vec::new())
        );
        let nowhere = JOB.replace("cluster = \"16xH100\"", "");
        assert!(choice_of(&nowhere, 16).unwrap_err().contains("job.cluster"));
    }
}
