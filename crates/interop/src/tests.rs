//! Properties of every framework: every change is reported as a deviation, and written configs read back.

mod unsupported;

use proptest::prelude::{
    ProptestConfig, Strategy as Generator, any, prop, prop_assert, prop_assert_eq, proptest,
};
use proptest::test_runner::TestCaseError;
use trainyard_arch::Flavor;
use trainyard_arch::{BIAS_UPDATE_RATE, BlockKind, DecoderConfig, MoeConfig, QkNorm};
use trainyard_schedule::ScheduleKind;

use super::*;
use trainyard_plan::{
    BlockActivations, Degrees, Generation, Offload, PipelineLayout, Precision, PrecisionByStage,
    Recompute, Synchronization, hardware_flops,
};

fn llama() -> DecoderConfig {
    DecoderConfig::from(Flavor::Llama3_8b)
}

/// Qwen3-30B-A3B.
fn mixture() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 151_936,
        hidden_size: 2048,
        intermediate_size: 6144,
        num_hidden_layers: 48,
        num_attention_heads: 32,
        num_key_value_heads: 4,
        head_dim: 128,
        qk_norm: Some(QkNorm::Head),
        max_position_embeddings: 32_768,
        moe: Some(MoeConfig::plain(128, 8, 768)),
        ..llama()
    }
}

fn shared_mixture() -> DecoderConfig {
    DecoderConfig {
        moe: Some(MoeConfig {
            n_shared_experts: 2,
            first_k_dense_replace: 3,
            bias_update_rate: Some(BIAS_UPDATE_RATE),
            ..MoeConfig::plain(64, 6, 768)
        }),
        ..mixture()
    }
}

fn shapes() -> impl Generator<Value = DecoderConfig> {
    let llamas = [
        Flavor::Llama3_8b,
        Flavor::Llama3_70b,
        Flavor::Llama3_405b,
        Flavor::Small,
    ];
    let mut all: Vec<DecoderConfig> = llamas.iter().map(|&f| DecoderConfig::from(f)).collect();
    for shape in &mut all {
        shape.max_position_embeddings = 8192;
    }
    all.extend([
        mixture(),
        shared_mixture(),
        DecoderConfig::gpt(96, 12_288, 96, 51_200, 8192),
    ]);
    prop::sample::select(all)
}

fn precisions() -> impl Generator<Value = Precision> {
    let of = |(compute, parameter, gradient, optimizer)| Precision {
        compute,
        parameter,
        gradient,
        reduced: gradient,
        optimizer,
    };
    let all = [
        (2, 0, 4, 12),
        (2, 2, 4, 12),
        (2, 2, 2, 16),
        (4, 4, 4, 8),
        (4, 4, 4, 12),
        (4, 0, 4, 12),
        (2, 0, 2, 6),
        (8, 0, 8, 24),
        (2, 2, 2, 12),
    ];
    prop::sample::select(all.map(of).to_vec())
}

fn degrees(has_experts: bool) -> impl Generator<Value = Degrees> {
    let power = |most: u32| (0..=most).prop_map(|exponent| 1usize << exponent);
    (power(3), power(2), power(3), power(2), power(3), power(3)).prop_map(
        move |(pp, dp_replicate, dp_shard, cp, tp, ep)| Degrees {
            dp_outer: 1,
            pp,
            dp_replicate,
            dp_shard,
            cp,
            tp,
            ep: if has_experts {
                ep.min(dp_shard * cp * tp)
            } else {
                1
            },
        },
    )
}

fn pipeline() -> impl Generator<Value = PipelineLayout> {
    (prop::sample::select(ScheduleKind::ALL.to_vec()), 1usize..4).prop_map(|(schedule, stages)| {
        PipelineLayout {
            schedule,
            stages_per_rank: schedule.num_chunks().unwrap_or(stages),
        }
    })
}

fn jobs() -> impl Generator<Value = (DecoderConfig, Strategy)> {
    shapes().prop_flat_map(|shape| {
        let sizes = (
            1usize..5,
            1usize..20,
            prop::sample::select(vec![4096, 8192]),
        );
        let recompute = prop::sample::select(vec![
            Recompute::None,
            Recompute::Selective,
            Recompute::SelectiveOp,
            Recompute::Full,
        ]);
        let offload = prop::sample::select(vec![
            Offload::None,
            Offload::None,
            Offload::Cpu,
            Offload::Nvme,
        ]);
        let switches = (0usize..4, any::<bool>(), recompute, offload);
        (
            degrees(shape.moe.is_some()),
            pipeline(),
            sizes,
            switches,
            precisions(),
        )
            .prop_map(
                move |(degrees, pipeline, (micro_batch, steps, seq_len), switches, precision)| {
                    let (zero_stage, sequence_parallel, recompute, offload) = switches;
                    let strategy = Strategy {
                        degrees,
                        zero_stage,
                        sequence_parallel,
                        pipeline,
                        global_batch: micro_batch * steps * degrees.data_parallel(),
                        micro_batch,
                        seq_len,
                        recompute,
                        offload,
                        precision,
                        synchronization: Synchronization::PLAIN,
                        split_points: Vec::new(),
                    };
                    (shape.clone(), strategy)
                },
            )
    })
}

/// The deviations that changed the config, as opposed to settings that are made elsewhere.
fn changes(deviations: &[Deviation]) -> Vec<&Deviation> {
    let is_change =
        |deviation: &&Deviation| matches!(deviation.resolution, Resolution::Approximated(_));
    deviations.iter().filter(is_change).collect()
}

fn check_round_trip(
    framework: Framework,
    shape: &DecoderConfig,
    strategy: &Strategy,
) -> Result<bool, TestCaseError> {
    let world = strategy.degrees.world_size();
    let written = match framework.write(shape, strategy, world) {
        Ok(written) => written,
        // A shape that does not divide over the ranks is rejected, not changed.
        Err(FrameworkError::Unsupported { .. } | FrameworkError::Config(_)) => return Ok(false),
        Err(error) => return Err(TestCaseError::fail(error.to_string())),
    };
    let context = format!("{framework}:\n{}\n{:?}", written.text, written.deviations);
    let read = framework.read(&written.text);
    let read = read.map_err(|error| TestCaseError::fail(format!("{error}\n{context}")))?;
    let is_exact = changes(&written.deviations).is_empty();
    if is_exact {
        prop_assert_eq!(&read.strategy, &canonical(strategy), "{}", context);
    } else {
        let model_alone = written
            .deviations
            .iter()
            .all(|deviation| deviation.setting == Setting::Model);
        prop_assert!(
            model_alone || read.strategy != canonical(strategy),
            "{}",
            context
        );
    }
    if let Some(found) = &read.shape {
        let lost = written
            .deviations
            .iter()
            .any(|deviation| deviation.setting == Setting::Model);
        prop_assert_eq!(!lost, is_same_model(found, shape), "{}", context);
    }
    // A strategy read from a framework's config is written to it again without changes.
    let shape = read.shape.as_ref().unwrap_or(shape);
    let world = read.strategy.degrees.world_size();
    let again = framework.write(shape, &read.strategy, world);
    let again = again.map_err(|error| TestCaseError::fail(format!("{error}\n{context}")))?;
    prop_assert!(
        changes(&again.deviations).is_empty(),
        "{:?}\n{}",
        again.deviations,
        context
    );
    prop_assert_eq!(
        &framework.read(&again.text).unwrap().strategy,
        &read.strategy
    );
    prop_assert_eq!(
        Framework::detect(&written.text),
        Some(framework),
        "{}",
        context
    );
    Ok(is_exact)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn emitted_configs_round_trip((shape, strategy) in jobs()) {
        for framework in Framework::ALL {
            check_round_trip(framework, &shape, &strategy)?;
        }
    }

    #[test]
    fn hostile_text_never_panics(text in "\\PC{0,200}", at in 0usize..4000, (shape, strategy) in jobs()) {
        for framework in Framework::ALL {
            let _ = framework.read(&text);
            let world = strategy.degrees.world_size();
            let Ok(written) = framework.write(&shape, &strategy, world) else { continue };
            let cut = written.text.char_indices().map(|(i, _)| i).nth(at).unwrap_or(0);
            let launch = LaunchInfo { world: Some(at), seq_len: Some(at), ..LaunchInfo::default() };
            let _ = framework.read_with(&format!("{}{text}{}", &written.text[..cut], &written.text[cut..]), &launch);
            let huge = written.text.replace(" 1", " 18446744073709551615");
            let _ = framework.read_with(&huge, &launch);
            let none = written.text.replace(" 1", " 0");
            let _ = framework.read_with(&none, &launch);
        }
        let _ = Framework::detect(&text);
    }
}

fn plain() -> Strategy {
    Strategy {
        degrees: Degrees {
            dp_shard: 8,
            ..Degrees::ONE
        },
        zero_stage: 3,
        sequence_parallel: false,
        pipeline: PipelineLayout {
            schedule: ScheduleKind::OneForwardOneBackward,
            stages_per_rank: 1,
        },
        global_batch: 64,
        micro_batch: 1,
        seq_len: 8192,
        recompute: Recompute::Full,
        offload: Offload::None,
        precision: Precision::MIXED,
        synchronization: Synchronization::PLAIN,
        split_points: Vec::new(),
    }
}

fn changed_settings(
    framework: Framework,
    shape: &DecoderConfig,
    strategy: &Strategy,
) -> Vec<Setting> {
    let written = framework
        .write(shape, strategy, strategy.degrees.world_size())
        .unwrap();
    changes(&written.deviations)
        .iter()
        .map(|deviation| deviation.setting)
        .collect()
}

/// Each framework expresses the most common strategies without deviations.
#[test]
fn common_strategies_have_no_deviations() {
    let three = Strategy {
        degrees: Degrees {
            pp: 4,
            dp_shard: 4,
            tp: 4,
            ..Degrees::ONE
        },
        sequence_parallel: true,
        pipeline: PipelineLayout {
            schedule: ScheduleKind::Interleaved,
            stages_per_rank: 2,
        },
        ..plain()
    };
    for framework in [
        Framework::Trainyard,
        Framework::Torchtitan,
        Framework::TorchtitanCommandLine,
    ] {
        for strategy in [&plain(), &three] {
            let mut strategy = strategy.clone();
            if framework == Framework::Trainyard {
                strategy.precision = PrecisionByStage::trainyard(2, 4).at(strategy.zero_stage);
            }
            assert_eq!(
                changed_settings(framework, &llama(), &strategy),
                [],
                "{framework}"
            );
        }
    }
    let precision = Precision::BF16;
    let megatron = Strategy { precision, ..three };
    for zero_stage in 0..4 {
        let megatron = Strategy {
            zero_stage,
            ..megatron.clone()
        };
        assert_eq!(
            changed_settings(Framework::Megatron, &llama(), &megatron),
            []
        );
        let deepspeed = Strategy {
            zero_stage,
            precision,
            ..plain()
        };
        assert_eq!(
            changed_settings(Framework::DeepSpeed, &llama(), &deepspeed),
            []
        );
    }
    let experts = Strategy {
        degrees: Degrees {
            ep: 8,
            ..plain().degrees
        },
        ..plain()
    };
    assert_eq!(
        changed_settings(Framework::Torchtitan, &mixture(), &experts),
        []
    );
    assert_eq!(
        changed_settings(Framework::TorchtitanCommandLine, &mixture(), &experts),
        []
    );
    let experts = Strategy {
        precision,
        ..experts
    };
    assert_eq!(
        changed_settings(Framework::Megatron, &shared_mixture(), &experts),
        []
    );
}

#[test]
fn missing_features_are_reported_as_deviations() {
    let offloaded = Strategy {
        offload: Offload::Nvme,
        recompute: Recompute::Selective,
        ..plain()
    };
    let ours = Strategy {
        precision: PrecisionByStage::trainyard(2, 4).at(offloaded.zero_stage),
        ..offloaded.clone()
    };
    assert_eq!(changed_settings(Framework::Trainyard, &llama(), &ours), []);
    assert_eq!(
        changed_settings(Framework::Torchtitan, &llama(), &offloaded),
        [Setting::Offload, Setting::Recompute]
    );
    assert_eq!(
        changed_settings(Framework::Megatron, &llama(), &offloaded),
        [Setting::Offload, Setting::Precision]
    );
    let gpt = DecoderConfig::gpt(24, 1024, 16, 50_304, 8192);
    let ours = Strategy {
        precision: ours.precision,
        ..plain()
    };
    assert_eq!(changed_settings(Framework::Trainyard, &gpt, &ours), []);
    assert_eq!(
        changed_settings(Framework::Torchtitan, &gpt, &plain()),
        [Setting::Model]
    );
    let grouped = DecoderConfig {
        num_key_value_heads: 4,
        ..gpt
    };
    assert_eq!(
        changed_settings(Framework::Trainyard, &grouped, &ours),
        [Setting::Model]
    );
}

#[test]
fn a_gpt2_round_trips() {
    let gpt2 = DecoderConfig {
        intermediate_size: 3000,
        tie_word_embeddings: false,
        ..DecoderConfig::gpt(12, 768, 12, 50_257, 8192)
    };
    let tied = DecoderConfig::gpt(12, 768, 12, 50_257, 8192);
    let strategy = Strategy {
        precision: PrecisionByStage::trainyard(2, 4).at(plain().zero_stage),
        ..plain()
    };
    for shape in [gpt2, tied] {
        let world = strategy.degrees.world_size();
        let written = Framework::Trainyard.write(&shape, &strategy, world);
        let written = written.unwrap();
        assert!(written.text.contains("name = \"gpt2\""), "{}", written.text);
        let read = Framework::Trainyard.read(&written.text).unwrap();
        assert_eq!(read.strategy, canonical(&strategy));
        let found = read.shape.unwrap();
        assert!(is_same_model(&found, &shape));
        assert_eq!(found.num_parameters(), shape.num_parameters());
        assert_eq!(found.max_position_embeddings, 8192);
    }
}

/// torchtitan's selective recomputation, as in its own config files.
#[test]
fn selective_op_recomputation_round_trips() {
    let toml = "[model]\nname = \"llama3\"\nflavor = \"8B\"\n[parallelism]\ndata_parallel_shard_degree = 8\n\
                [activation_checkpoint]\nmode = \"selective\"\nselective_ac_option = \"op\"\n";
    let read = Framework::Torchtitan.read(toml).unwrap();
    assert_eq!(read.strategy.recompute, Recompute::SelectiveOp);
    let (shape, strategy) = (read.shape.unwrap(), read.strategy);
    for framework in [Framework::Torchtitan, Framework::TorchtitanCommandLine] {
        assert_eq!(changed_settings(framework, &shape, &strategy), []);
    }
    for framework in [Framework::Trainyard, Framework::Megatron] {
        assert!(changed_settings(framework, &shape, &strategy).contains(&Setting::Recompute));
    }
    // It saves more than full recomputation and less than none, and recomputes less than full.
    let costs = |recompute: Recompute| {
        let strategy = Strategy {
            recompute,
            ..strategy.clone()
        };
        let block = BlockActivations::of(&shape, &strategy, &Software::MODERN, BlockKind::Dense);
        (block.saved(recompute), hardware_flops(&shape, &strategy))
    };
    let [none, products, full] =
        [Recompute::None, Recompute::SelectiveOp, Recompute::Full].map(costs);
    assert!(full.0 < products.0 && products.0 < none.0);
    assert!(none.1 < products.1 && products.1 < full.1);
}

#[test]
fn configs_determine_the_software() {
    let strategy = Strategy {
        zero_stage: 1,
        ..plain()
    };
    let world = strategy.degrees.world_size();
    let text = |framework: Framework| {
        let written = framework.write(&llama(), &strategy, world);
        written.unwrap().text
    };
    // A written config runs as the planner estimated it, but DeepSpeed reduces gradients in two bytes.
    for framework in Framework::ALL {
        let software = framework.read(&text(framework)).unwrap().software;
        let bytes = if framework == Framework::DeepSpeed {
            2
        } else {
            4
        };
        let base = match framework {
            Framework::Megatron => Software {
                overlaps_tensor: false,
                ..Software::MEGATRON_CORE
            },
            // Without sequence parallelism there is nothing to gather again.
            _ => Software {
                gathers_sequence_again: framework == Framework::DeepSpeed,
                ..Software::MODERN
            },
        };
        let priced = Software {
            gradient_on_wire: bytes,
            ..base
        };
        assert_eq!(software, priced, "{framework}");
    }
    let megatron = text(Framework::Megatron);
    let plain = megatron
        .replace(
            "--overlap-grad-reduce --overlap-param-gather",
            "--tp-comm-overlap",
        )
        .replace(
            "--attention-dropout 0.0 --hidden-dropout 0.0",
            "--attention-backend unfused",
        )
        .replace("--bf16", "--bf16 --grad-reduce-in-bf16");
    let software = Framework::Megatron.read(&plain).unwrap().software;
    let expected = Software {
        generation: Generation::Current,
        overlaps_tensor: true,
        ..Software::MEGATRON_2021
    };
    assert_eq!(software, expected);
    let deepspeed =
        text(Framework::DeepSpeed).replace("\"overlap_comm\": true", "\"overlap_comm\": false");
    assert!(
        !Framework::DeepSpeed
            .read(&deepspeed)
            .unwrap()
            .software
            .overlaps_data
    );
}

#[test]
fn launch_info_completes_a_config() {
    let toml = "[model]\nname = \"llama3\"\nflavor = \"8B\"\n[activation_checkpoint]\nmode = \"none\"\n\
                [parallelism]\ntensor_parallel_degree = 2";
    let launch = LaunchInfo {
        world: Some(16),
        ..LaunchInfo::default()
    };
    let read = Framework::Torchtitan.read_with(toml, &launch).unwrap();
    assert_eq!((read.strategy.degrees.dp_shard, read.world), (8, None));
    assert_eq!(read.shape.unwrap().num_hidden_layers, 32);
    let json = r#"{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}"#;
    let launch = LaunchInfo {
        seq_len: Some(1024),
        ..launch
    };
    let read = Framework::DeepSpeed.read_with(json, &launch).unwrap();
    assert_eq!(
        (read.strategy.global_batch, read.strategy.degrees.dp_shard),
        (32, 16)
    );
}
