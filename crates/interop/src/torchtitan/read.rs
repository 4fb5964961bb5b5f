//! Reads torchtitan's settings.

use trainyard_schedule::ScheduleKind;

use super::super::{Framework, FrameworkError, LaunchInfo, ParsedJob, check_degrees};
use super::flavors::{FLAVORS, Flavor, Registered};
use super::keys::Keys;
use super::{PRECISIONS, mixes_types, precision};
use trainyard_plan::{
    Degrees, Offload, PipelineLayout, Precision, Recompute, Software, Strategy, Synchronization,
};

/// Keys that the planner supports only at their default: the key, the default, and why.
const UNSUPPORTED: [(&str, &str, &str); 4] = [
    (
        "parallelism.pipeline_parallel_schedule_csv",
        "",
        "the planner supports named schedules only",
    ),
    (
        "parallelism.module_fqns_per_model_part",
        "",
        "the planner splits layers evenly",
    ),
    (
        "parallelism.pipeline_parallel_first_stage_less_layers",
        "1",
        "the planner counts embedding and head as one layer each",
    ),
    (
        "parallelism.pipeline_parallel_last_stage_less_layers",
        "1",
        "the planner counts embedding and head as one layer each",
    ),
];

pub(super) fn read(
    keys: &Keys,
    world: Option<usize>,
    launch: &LaunchInfo,
) -> Result<ParsedJob, FrameworkError> {
    let framework = keys.framework;
    for (key, default, why) in UNSUPPORTED {
        if let Some(value) = keys.get(key).filter(|&value| value != default) {
            return Err(framework.unsupported(format!("{key} = {value}"), why, "remove it"));
        }
    }
    if let Some(converters) = keys.get("model.converters").filter(|&list| list != "[]") {
        return Err(framework.unsupported(
            format!("model.converters = {converters}"),
            "the planner does not model 8-bit types",
            "remove it",
        ));
    }
    let flavor = read_flavor(keys)?;
    let defaults = flavor.and_then(|flavor| flavor.config);
    let defaults = defaults.filter(|_| framework == Framework::TorchtitanCommandLine);
    let degrees = read_degrees(keys, defaults, world.or(launch.world))?;
    let num_layers = flavor.map(|flavor| flavor.shape(0).num_hidden_layers);
    let seq_len = keys.count("training.seq_len", defaults.map_or(2048, |d| d.seq_len))?;
    let (global_batch, micro_batch) = read_batch(keys, defaults, &degrees)?;
    let mut strategy = Strategy {
        degrees,
        zero_stage: read_stage(keys, &degrees)?,
        sequence_parallel: keys.flag("parallelism.enable_sequence_parallel", true)?,
        pipeline: read_layers(keys, defaults, &degrees, num_layers)?,
        global_batch,
        micro_batch,
        seq_len,
        recompute: read_recompute(keys, flavor, defaults)?,
        offload: if keys.flag("training.enable_cpu_offload", false)? {
            Offload::Cpu
        } else {
            Offload::None
        },
        precision: read_precision(keys)?,
        synchronization: Synchronization::PLAIN,
        split_points: Vec::new(),
    };
    let is_sharded = degrees.dp_shard * degrees.cp > 1;
    if !is_sharded && framework == Framework::Torchtitan {
        // FSDP implements offloading, and is not in use here.
        strategy.offload = Offload::None;
        strategy.zero_stage = 0;
    }
    if strategy.precision == precision(2, 4) && !mixes_types(framework, &strategy) {
        strategy.precision = precision(4, 4);
    }
    Ok(ParsedJob {
        software: read_software(keys)?,
        shape: flavor.map(|flavor| flavor.shape(seq_len)),
        strategy,
        world,
        unmodeled: Vec::new(),
    })
}

/// The model's flavor, or `None` if it is not in our table.
pub(super) fn read_flavor(keys: &Keys) -> Result<Option<&'static Flavor>, FrameworkError> {
    if keys.framework == Framework::Torchtitan {
        let module = keys.get("model.name").unwrap_or("llama3");
        let name = keys.get("model.flavor").unwrap_or("debugmodel");
        return Ok(FLAVORS
            .iter()
            .find(|f| f.module == module && f.name == name));
    }
    let Some(name) = keys.get("config") else {
        let remedy = "add --config, because its defaults are part of the job";
        return Err(keys.framework.unspecified("the registered config", remedy));
    };
    let configs = FLAVORS
        .iter()
        .filter_map(|flavor| Some((flavor, flavor.config?)));
    let usable: Vec<_> = configs.filter(|(_, config)| !config.is_float8).collect();
    let known = usable.iter().find(|(_, config)| config.name == name);
    known.map(|(flavor, _)| Some(*flavor)).ok_or_else(|| {
        let names: Vec<_> = usable.iter().map(|(_, config)| config.name).collect();
        let why = match name {
            "llama3_405b" => {
                "it uses float8 matrix products, and the planner does not model 8-bit types"
            }
            _ => "the defaults of this config are not known to the planner",
        };
        let nearest = format!("use one of {}", names.join(", "));
        keys.framework
            .unsupported(format!("--config {name}"), why, nearest)
    })
}

fn read_degrees(
    keys: &Keys,
    defaults: Option<Registered>,
    world: Option<usize>,
) -> Result<Degrees, FrameworkError> {
    let tp = defaults.map_or(1, |d| d.tensor_parallel_degree);
    let count = |key: &str, default| keys.count(&format!("parallelism.{key}"), default);
    let mut degrees = Degrees {
        dp_outer: 1,
        pp: count("pipeline_parallel_degree", 1)?,
        dp_replicate: count("data_parallel_replicate_degree", 1)?,
        dp_shard: 1,
        cp: count("context_parallel_degree", 1)?,
        tp: count("tensor_parallel_degree", tp)?,
        ep: count("expert_parallel_degree", 1)?,
    };
    let taken = [degrees.pp, degrees.dp_replicate, degrees.cp, degrees.tp];
    degrees.dp_shard = match keys.rest("parallelism.data_parallel_shard_degree", None)? {
        Some(shard) => shard,
        None => keys.framework.left_of(world, &taken)?,
    };
    let etp = count("expert_tensor_parallel_degree", 1)?;
    if degrees.ep > 1 && etp > 1 {
        return Err(keys.framework.unsupported(
            format!("expert_tensor_parallel_degree = {etp}"),
            "the planner distributes unsplit experts over all tensor-parallel ranks",
            "use 1",
        ));
    }
    check_degrees(keys.framework, &degrees)?;
    Ok(degrees)
}

fn read_stage(keys: &Keys, degrees: &Degrees) -> Result<usize, FrameworkError> {
    match keys
        .get("parallelism.fsdp_reshard_after_forward")
        .unwrap_or("default")
    {
        "always" => Ok(3),
        "never" => Ok(2),
        "default" if degrees.pp > 1 => Ok(2),
        "default" => Ok(3),
        other => Err(FrameworkError::Value {
            key: "fsdp_reshard_after_forward".to_owned(),
            value: other.to_owned(),
            expected: "\"default\", \"always\" or \"never\"",
        }),
    }
}

/// The global batch and the micro-batch, in samples.
fn read_batch(
    keys: &Keys,
    defaults: Option<Registered>,
    degrees: &Degrees,
) -> Result<(usize, usize), FrameworkError> {
    let local = keys.count(
        "training.local_batch_size",
        defaults.map_or(8, |d| d.local_batch_size),
    )?;
    let at_once = local.saturating_mul(degrees.data_parallel());
    let global = keys
        .rest("training.global_batch_size", None)?
        .unwrap_or(at_once);
    if degrees.pp == 1 {
        return Ok((global, local));
    }
    if global != at_once {
        let each = global / degrees.data_parallel().max(1);
        return Err(keys.framework.unsupported(
            format!("global_batch_size = {global} with local_batch_size = {local}"),
            "the pipeline would drain several times per step, and the planner models one drain",
            format!("use local_batch_size = {each}"),
        ));
    }
    let micro = keys.count("parallelism.pipeline_parallel_microbatch_size", 1)?;
    Ok((global, micro))
}

fn read_layers(
    keys: &Keys,
    defaults: Option<Registered>,
    degrees: &Degrees,
    num_layers: Option<usize>,
) -> Result<PipelineLayout, FrameworkError> {
    let key = "parallelism.pipeline_parallel_schedule";
    let name = keys
        .get(key)
        .unwrap_or(defaults.map_or("1F1B", |d| d.schedule));
    let schedule = match name.to_ascii_lowercase().as_str() {
        "1f1b" => ScheduleKind::OneForwardOneBackward,
        "gpipe" => ScheduleKind::GPipe,
        "interleaved1f1b" => ScheduleKind::Interleaved,
        "loopedbfs" => ScheduleKind::LoopedBreadthFirst,
        "zbvzerobubble" => ScheduleKind::ZeroBubbleV,
        "dualpipev" => ScheduleKind::DualPipeV,
        _ => {
            return Err(keys.framework.unsupported(
                format!("pipeline_parallel_schedule = {name:?}"),
                "the planner has no such schedule",
                "use 1F1B, GPipe, Interleaved1F1B, LoopedBFS, ZBVZeroBubble or DualPipeV",
            ));
        }
    };
    let length = keys.count("parallelism.pipeline_parallel_layers_per_stage", 0)?;
    let stages_per_rank = match (schedule.num_chunks(), length) {
        (Some(fixed), _) => fixed,
        (None, 0) => 2,
        (None, length) => {
            let Some(num_layers) = num_layers else {
                let remedy = "remove pipeline_parallel_layers_per_stage";
                return Err(keys.framework.unspecified("the number of layers", remedy));
            };
            let stages = (num_layers + 2).div_ceil(length);
            if degrees.pp == 0 || !stages.is_multiple_of(degrees.pp) {
                return Err(keys.framework.unsupported(
                    format!("pipeline_parallel_layers_per_stage = {length}"),
                    format!(
                        "{stages} stages do not divide evenly over {} pipeline ranks",
                        degrees.pp
                    ),
                    "use another number of layers per stage",
                ));
            }
            stages / degrees.pp
        }
    };
    Ok(PipelineLayout {
        schedule,
        stages_per_rank,
    })
}

/// torchtitan's behavior with these keys: FSDP overlaps its communication, and by default reduces in 32 bits.
fn read_software(keys: &Keys) -> Result<Software, FrameworkError> {
    let key = match keys.framework {
        Framework::TorchtitanCommandLine => "compile.enable_async_tensor_parallel",
        _ => "parallelism.enable_async_tensor_parallel",
    };
    let reduce_dtype = keys.get("training.mixed_precision_reduce");
    Ok(Software {
        gathers_sequence_again: false,
        overlaps_tensor: keys.flag(key, false)?,
        gradient_on_wire: if reduce_dtype == Some("bfloat16") {
            2
        } else {
            4
        },
        ..Software::MODERN
    })
}

/// Keys that name matrix products to recompute always, whatever the alternation is.
const NAMED_MATMULS: [&str; 2] = [
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
    "activation_checkpoint.force_recompute_mm_shapes_by_fqns",
];

/// Whether selective recomputation is the variant that the planner models.
fn counts_matmuls(keys: &Keys, flavor: Option<&Flavor>) -> bool {
    let usual = ["[]", "[\"moe.router.gate\"]", "moe.router.gate"];
    let is_usual = |key: &&str| keys.get(key).is_none_or(|names| usual.contains(&names));
    let shape = flavor.map(|flavor| flavor.shape(0));
    let is_dense = shape.is_none_or(|shape| shape.moe.is_none() && shape.latent.is_none());
    is_dense && NAMED_MATMULS.iter().all(is_usual)
}

fn read_recompute(
    keys: &Keys,
    flavor: Option<&Flavor>,
    defaults: Option<Registered>,
) -> Result<Recompute, FrameworkError> {
    let (mode, option) = match defaults {
        Some(defaults) => {
            let given = keys.get("activation_checkpoint:");
            (given.unwrap_or(defaults.recompute), "op")
        }
        None => (
            keys.get("activation_checkpoint.mode")
                .unwrap_or("selective"),
            keys.get("activation_checkpoint.selective_ac_option")
                .unwrap_or("2"),
        ),
    };
    let why = match (mode, option) {
        ("none" | "None", _) => return Ok(Recompute::None),
        ("full", _) | ("selective", "1") => return Ok(Recompute::Full),
        ("selective", "op") if counts_matmuls(keys, flavor) => return Ok(Recompute::SelectiveOp),
        ("selective", "op") => "the planner models it for dense blocks only",
        ("selective", _) => "the planner models the same recomputation in every block",
        _ => "the planner does not model this policy",
    };
    let what = match option {
        "op" => format!("activation checkpointing {mode:?}"),
        option => format!("activation checkpointing {mode:?} of {option:?}"),
    };
    Err(keys
        .framework
        .unsupported(what, why, "use \"full\" or \"none\""))
}

fn read_precision(keys: &Keys) -> Result<Precision, FrameworkError> {
    let held = keys.get("training.dtype").unwrap_or("float32");
    let computed = keys
        .get("training.mixed_precision_param")
        .unwrap_or("bfloat16");
    let known = PRECISIONS
        .iter()
        .find(|(_, a, b)| (*a, *b) == (held, computed));
    known.map(|(precision, ..)| *precision).ok_or_else(|| {
        keys.framework.unsupported(
            format!("dtype = {held:?} with mixed_precision_param = {computed:?}"),
            "the planner supports compute in the type of the weights or in bfloat16",
            "use dtype = \"float32\" with mixed_precision_param = \"bfloat16\"",
        )
    })
}
