//! `parallelism = "auto"`: the choice of the planner as config overrides.
//!
//! Every rank asks the planner. The result depends only on the config and the number of ranks, so all ranks agree.

use trainyard_config::{Config, ModelSpec};
use trainyard_interop::Framework;
use trainyard_launcher::MAX_WORLD_SIZE;
use trainyard_plan::{Plan, PrecisionByStage};

use super::plan::request::{cluster, request};
use crate::failure::Failure;

/// The overrides that the planner chose; none unless the config says `parallelism = "auto"`.
pub(super) fn choice(config: &Config, world: usize) -> Result<Vec<String>, Failure> {
    if !config.parallelism.auto {
        return Ok(Vec::new());
    }
    let planned = planned(config, world)?;
    let chosen = Config::parse(&planned, &[]).map_err(Failure::new)?;
    let p = &chosen.parallelism;
    let mut arguments = Vec::new();
    let mut set = |key: &str, value: String| arguments.extend([format!("--{key}"), value]);
    set("parallelism.auto", "false".to_owned());
    for (key, degree) in [
        (
            "data_parallel_replicate_degree",
            p.data_parallel_replicate_degree,
        ),
        ("data_parallel_shard_degree", p.data_parallel_shard_degree),
        ("tensor_parallel_degree", p.tensor_parallel_degree),
        ("context_parallel_degree", p.context_parallel_degree),
        ("pipeline_parallel_degree", p.pipeline_parallel_degree),
        ("expert_parallel_degree", p.expert_parallel_degree),
        ("zero_stage", p.zero_stage as i64),
        (
            "pipeline_parallel_stages_per_rank",
            p.pipeline_parallel_stages_per_rank as i64,
        ),
    ] {
        set(&format!("parallelism.{key}"), degree.to_string());
    }
    set(
        "parallelism.enable_sequence_parallel",
        p.enable_sequence_parallel.to_string(),
    );
    set(
        "parallelism.pipeline_parallel_schedule",
        p.pipeline_parallel_schedule.clone(),
    );
    if let Some(points) = &p.pipeline_parallel_split_points {
        set("parallelism.pipeline_parallel_split_points", points.clone());
    }
    set(
        "training.local_batch_size",
        chosen.training.local_batch_size.to_string(),
    );
    let global = chosen.training.global_batch_size;
    set(
        "training.global_batch_size",
        global.unwrap_or(1).to_string(),
    );
    let mode = match chosen.activation_checkpoint.mode {
        trainyard_config::ActivationCheckpointMode::Full => "full",
        trainyard_config::ActivationCheckpointMode::Selective => "selective",
        _ => "none",
    };
    set("activation_checkpoint.mode", mode.to_owned());
    Ok(arguments)
}

/// The best plan as a config.
fn planned(config: &Config, world: usize) -> Result<String, Failure> {
    let Some(name) = &config.job.cluster else {
        return Err(Failure::new("parallelism = \"auto\" needs a cluster")
            .hint("set job.cluster, as in job.cluster = \"64xH100\""));
    };
    let cluster = cluster(name)?;
    if cluster.world_size() != world {
        return Err(Failure::new(format!(
            "job.cluster = {name:?} has {} ranks, but the job has {world}",
            cluster.world_size()
        ))
        .hint("set job.cluster to the cluster of the job, or start as many ranks"));
    }
    let model = config.model.resolve().map_err(Failure::new)?;
    let ModelSpec::Decoder(shape) = model else {
        return Err(
            Failure::new("parallelism = \"auto\" supports decoders only")
                .hint("use model.name = \"llama\" or \"gpt2\", or set the degrees"),
        );
    };
    let training = &config.training;
    let global = training.global_batch_size;
    let global = global.unwrap_or(training.local_batch_size * world);
    let precision =
        PrecisionByStage::trainyard(training.compute_dtype().size(), training.dtype.size());
    let request = request(*shape, cluster, global, training.seq_len, precision);
    let found = trainyard_plan::search(&request);
    let write = |plan: &Plan| Framework::Trainyard.write(&request.shape, &plan.strategy, world);
    // The fastest plan that our config can express without loss.
    let mut all = found.plans.iter().filter_map(|plan| write(plan).ok());
    let written = all.find(|written| written.deviations.is_empty());
    let written = written.ok_or_else(|| {
        Failure::new(format!("no plan fits {name}"))
            .hint("`trainyard plan` shows how much memory is missing")
    })?;
    Ok(written.text)
}

/// The number of ranks in the environment of the launcher; one without a launcher.
pub(super) fn world_size() -> usize {
    launched_world_size().unwrap_or(1)
}

/// The number of ranks in the environment of the launcher.
pub(super) fn launched_world_size() -> Option<usize> {
    let named = |name| std::env::var(name).ok()?.parse().ok();
    // For an elastic job the plan is for all nodes; the engine rescales it.
    named(MAX_WORLD_SIZE).or_else(|| named("WORLD_SIZE"))
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
    fn a_gpt2_is_planned_too() {
        let job = "parallelism = \"auto\"\n[job]\ncluster = \"16xH100\"\n[model]\nname = \"gpt2\"\n\
            [training]\nseq_len = 1024\nglobal_batch_size = 64\nmixed_precision_param = \"bfloat16\"\n";
        let arguments = choice_of(job, 16).unwrap();
        let config = Config::parse(job, &arguments).unwrap();
        assert_eq!(config.mesh(16).unwrap().world_size(), 16);
        let image = job.replace("gpt2", "cnn");
        assert!(choice_of(&image, 16).unwrap_err().contains("decoders"));
    }

    #[test]
    fn a_mixture_is_planned_with_its_experts_on_different_ranks() {
        let job = "parallelism = \"auto\"\n[job]\ncluster = \"16xH100\"\n[model]\nflavor = \"llama3-8b\"\n\
            [model.moe]\nnum_experts = 16\nnum_experts_per_tok = 2\nmoe_intermediate_size = 4096\n[training]\nseq_len = 4096\n\
            global_batch_size = 64\nmixed_precision_param = \"bfloat16\"\n";
        let arguments = choice_of(job, 16).unwrap();
        let config = Config::parse(job, &arguments).unwrap();
        let mesh = config.mesh(16).unwrap();
        assert_eq!(mesh.world_size(), 16);
        assert!(mesh.ep() > 1, "{mesh}");
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
