//! What torchtitan's settings say.

use trainyard_schedule::Kind;

use super::super::{Framework, FrameworkError, Read, Told, check_degrees};
use super::flavors::{FLAVORS, Flavor, Registered};
use super::keys::Keys;
use super::{PRECISIONS, mixes_types, precision};
use crate::{Degrees, Layers, Offload, Precision, Recompute, Software, Strategy};

/// What both versions do with the layers that a pipeline splits, unless they are told otherwise.
const UNREAD: [(&str, &str, &str); 4] = [
    (
        "parallelism.pipeline_parallel_schedule_csv",
        "",
        "a plan knows schedules by name",
    ),
    (
        "parallelism.module_fqns_per_model_part",
        "",
        "a plan splits layers evenly",
    ),
    (
        "parallelism.pipeline_parallel_first_stage_less_layers",
        "1",
        "a plan counts an end as a layer",
    ),
    (
        "parallelism.pipeline_parallel_last_stage_less_layers",
        "1",
        "a plan counts an end as a layer",
    ),
];

pub(super) fn read(keys: &Keys, world: Option<usize>, told: &Told) -> Result<Read, FrameworkError> {
    let framework = keys.framework;
    for (key, default, why) in UNREAD {
        if let Some(value) = keys.get(key).filter(|&value| value != default) {
            return Err(framework.refusal(format!("{key} = {value}"), why, "remove it"));
        }
    }
    if let Some(converters) = keys.get("model.converters").filter(|&list| list != "[]") {
        return Err(framework.refusal(
            format!("model.converters = {converters}"),
            "a plan knows no types of one byte",
            "remove it",
        ));
    }
    let flavor = read_flavor(keys)?;
    let defaults = flavor.and_then(|flavor| flavor.config);
    let defaults = defaults.filter(|_| framework == Framework::TorchtitanCommandLine);
    let degrees = read_degrees(keys, defaults, world.or(told.world))?;
    let num_layers = flavor.map(|flavor| flavor.shape(0).num_hidden_layers);
    let seq_len = keys.count("training.seq_len", defaults.map_or(2048, |d| d.seq_len))?;
    let (global_batch, micro_batch) = read_batch(keys, defaults, &degrees)?;
    let mut strategy = Strategy {
        degrees,
        zero_stage: read_stage(keys, &degrees)?,
        sequence_parallel: keys.flag("parallelism.enable_sequence_parallel", true)?,
        layers: read_layers(keys, defaults, &degrees, num_layers)?,
        global_batch,
        micro_batch,
        seq_len,
        recompute: read_recompute(keys, flavor, defaults)?,
        offload: match keys.flag("training.enable_cpu_offload", false)? {
            true => Offload::Cpu,
            false => Offload::None,
        },
        precision: read_precision(keys)?,
    };
    let is_sharded = degrees.dp_shard * degrees.cp > 1;
    if !is_sharded && framework == Framework::Torchtitan {
        // Offloading belongs to FSDP, which is not there.
        strategy.offload = Offload::None;
        strategy.zero_stage = 0;
    }
    if strategy.precision == precision(2, 4) && !mixes_types(framework, &strategy) {
        strategy.precision = precision(4, 4);
    }
    Ok(Read {
        software: read_software(keys)?,
        shape: flavor.map(|flavor| flavor.shape(seq_len)),
        strategy,
        world,
    })
}

/// The model; none where it is one that nobody here knows.
fn read_flavor(keys: &Keys) -> Result<Option<&'static Flavor>, FrameworkError> {
    if keys.framework == Framework::Torchtitan {
        let module = keys.get("model.name").unwrap_or("llama3");
        let name = keys.get("model.flavor").unwrap_or("debugmodel");
        return Ok(FLAVORS
            .iter()
            .find(|f| f.module == module && f.name == name));
    }
    let Some(name) = keys.get("config") else {
        let remedy = "give --config, for its defaults are part of the job";
        return Err(keys.framework.untold("which config it starts from", remedy));
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
                "it multiplies matrices in float8, and a plan knows no types of one byte"
            }
            _ => "what a config sets by itself is written in Python",
        };
        let nearest = format!("use one of {}", names.join(", "));
        keys.framework
            .refusal(format!("--config {name}"), why, nearest)
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
        return Err(keys.framework.refusal(
            format!("expert_tensor_parallel_degree = {etp}"),
            "a plan lays experts over all ranks of tp, and splits none",
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

/// Samples of a step, and of a micro-batch.
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
        return Err(keys.framework.refusal(
            format!("global_batch_size = {global} with local_batch_size = {local}"),
            "the pipeline would drain several times a step, and a plan's drains once",
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
) -> Result<Layers, FrameworkError> {
    let key = "parallelism.pipeline_parallel_schedule";
    let name = keys
        .get(key)
        .unwrap_or(defaults.map_or("1F1B", |d| d.schedule));
    let schedule = match name.to_ascii_lowercase().as_str() {
        "1f1b" => Kind::OneForwardOneBackward,
        "gpipe" => Kind::GPipe,
        "interleaved1f1b" => Kind::Interleaved,
        "loopedbfs" => Kind::LoopedBreadthFirst,
        "zbvzerobubble" => Kind::ZeroBubbleV,
        "dualpipev" => Kind::DualPipeV,
        _ => {
            return Err(keys.framework.refusal(
                format!("pipeline_parallel_schedule = {name:?}"),
                "a plan has no such schedule",
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
                let remedy = "leave pipeline_parallel_layers_per_stage out";
                return Err(keys
                    .framework
                    .untold("how many layers the model has", remedy));
            };
            let stages = (num_layers + 2).div_ceil(length);
            if degrees.pp == 0 || !stages.is_multiple_of(degrees.pp) {
                return Err(keys.framework.refusal(
                    format!("pipeline_parallel_layers_per_stage = {length}"),
                    format!(
                        "{stages} stages are not shared evenly by {} ranks",
                        degrees.pp
                    ),
                    "use another length",
                ));
            }
            stages / degrees.pp
        }
    };
    Ok(Layers {
        schedule,
        stages_per_rank,
    })
}

/// What torchtitan does with these keys: FSDP hides what it sends, and sums in 32 bits unless told otherwise.
fn read_software(keys: &Keys) -> Result<Software, FrameworkError> {
    let key = match keys.framework {
        Framework::TorchtitanCommandLine => "compile.enable_async_tensor_parallel",
        _ => "parallelism.enable_async_tensor_parallel",
    };
    let travels = keys.get("training.mixed_precision_reduce");
    Ok(Software {
        overlaps_tensor: keys.flag(key, false)?,
        gradient_on_wire: if travels == Some("bfloat16") { 2 } else { 4 },
        ..Software::MODERN
    })
}

/// Keys that name products to be computed again whatever their number, and what they say by default.
const NAMED_PRODUCTS: [&str; 2] = [
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
    "activation_checkpoint.force_recompute_mm_shapes_by_fqns",
];

/// Whether its selective recomputation is the one that a plan knows.
fn counts_products(keys: &Keys, flavor: Option<&Flavor>) -> bool {
    let usual = ["[]", "[\"moe.router.gate\"]", "moe.router.gate"];
    let is_usual = |key: &&str| keys.get(key).is_none_or(|names| usual.contains(&names));
    let shape = flavor.map(|flavor| flavor.shape(0));
    let is_dense = shape.is_none_or(|shape| shape.experts.is_none() && shape.latent.is_none());
    is_dense && NAMED_PRODUCTS.iter().all(is_usual)
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
        ("selective", "op") if counts_products(keys, flavor) => return Ok(Recompute::Products),
        ("selective", "op") => "a plan knows what it keeps of dense blocks alone",
        ("selective", _) => "a plan recomputes the same in every block",
        _ => "a plan knows no such policy",
    };
    let what = match option {
        "op" => format!("activation checkpointing {mode:?}"),
        option => format!("activation checkpointing {mode:?} of {option:?}"),
    };
    Err(keys
        .framework
        .refusal(what, why, "use \"full\" or \"none\""))
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
        keys.framework.refusal(
            format!("dtype = {held:?} with mixed_precision_param = {computed:?}"),
            "a plan's layers compute in the type of weights or in bfloat16",
            "use dtype = \"float32\" with mixed_precision_param = \"bfloat16\"",
        )
    })
}
