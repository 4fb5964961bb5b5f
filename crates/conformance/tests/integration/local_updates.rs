//! Replicas that take optimizer steps of their own, on real ranks.

use std::error::Error;

use trainyard_config::{Config, Dtype, GradientCompression, LocalUpdateMethod, OptimizerName};
use trainyard_conformance::training::{
    Tolerance, Trained, agreed_fingerprint, assert_close, debug_llama, distance, divided,
    on_rank_0, reference, train_on,
};
use trainyard_conformance::{Case, Outcome, Rank, Suite};
use trainyard_trace::Purpose;
use trainyard_train::dry_run::dry_run;

const ON_4_RANKS: &[Case] = &[
    Case {
        name: "one_replica_equals_plain_training",
        run: one_replica,
    },
    Case {
        name: "sgd_that_is_joined_in_every_step_equals_one_rank",
        run: joined_in_every_step,
    },
    Case {
        name: "until_the_start_step_training_equals_one_rank",
        run: post_local_sgd,
    },
    Case {
        name: "every_method_converges_and_sends_the_bytes_of_the_closed_form",
        run: every_method,
    },
];

/// The suites of this module.
pub const SUITES: &[Suite] = &[Suite {
    name: "local_updates",
    sizes: &[4],
    full_sizes: &[],
    cases: ON_4_RANKS,
    also_over_network: false,
}];

/// Plain SGD, whose updates are linear in gradients, without clipping, which depends on the batch of a replica.
fn sgd() -> Config {
    let mut config = debug_llama(Dtype::Float64);
    config.optimizer.name = OptimizerName::Sgd.into();
    config.optimizer.momentum = 0.0;
    config.training.max_norm = 0.0;
    config
}

/// A change of a config.
type Change = fn(&mut Config);

fn outer(config: &Config, num_replicas: usize, sync_steps: u64) -> Config {
    let mut config = config.clone();
    config.parallelism.data_parallel_outer_degree = num_replicas as i64;
    config.local_updates.method = LocalUpdateMethod::LocalSgd;
    config.local_updates.sync_steps = sync_steps;
    config
}

/// An outer learning rate of 1 without momentum takes the replica's own parameters.
fn one_replica(rank: &Rank) -> Outcome {
    let config = debug_llama(Dtype::Float64);
    let expected = on_rank_0(rank, || reference(&config))?;
    for sync_steps in [1, 3, 7] {
        let config = divided(&outer(&config, 1, sync_steps), rank.size(), 1);
        let run = train_on(rank, &config)?;
        if let Some(expected) = &expected {
            run.assert_agrees(expected, Tolerance::of(Dtype::Float64));
        }
    }
    Ok(())
}

/// The mean of one update per replica is the update with the mean gradient, whatever the mesh inside a replica.
fn joined_in_every_step(rank: &Rank) -> Outcome {
    let config = sgd();
    let expected = on_rank_0(rank, || reference(&config))?;
    let meshes: [(&str, Change); 5] = [
        ("four replicas", |c| {
            c.parallelism.data_parallel_outer_degree = 4
        }),
        ("DDP", |_| ()),
        ("ZeRO 3", |c| c.parallelism.data_parallel_shard_degree = -1),
        ("tp", |c| c.parallelism.tensor_parallel_degree = 2),
        ("pp", |c| c.parallelism.pipeline_parallel_degree = 2),
    ];
    for (name, change) in meshes {
        let mut config = outer(&config, 2, 1);
        change(&mut config);
        let mesh = config.mesh(rank.size())?;
        let num_microbatches = 1 + usize::from(name == "pp");
        let config = divided(
            &config,
            mesh.size_of(trainyard_train::data_axes()),
            num_microbatches,
        );
        let run = train_on(rank, &config)?;
        assert_agrees(rank, &run, expected.as_ref(), name)?;
    }
    Ok(())
}

/// Each replica reports the loss of its own samples, so their mean is compared.
fn assert_agrees(rank: &Rank, run: &Trained, expected: Option<&Trained>, what: &str) -> Outcome {
    let all = rank.all_gather(&run.losses)?;
    let mean = |step: usize| all.iter().map(|losses| losses[step]).sum::<f64>() / all.len() as f64;
    if let Some(expected) = expected {
        let means: Vec<f64> = (0..run.losses.len()).map(mean).collect();
        assert_close(what, &means, &expected.losses, 1e-9);
        for (name, expected) in &expected.parameters {
            let off = distance(&run.parameters[name], expected);
            assert!(off <= 1e-9, "{what}: {name} differs by {off:e}");
        }
    }
    Ok(())
}

/// Before the start step, replicas average gradients: AdamW is the same on all of them.
fn post_local_sgd(rank: &Rank) -> Outcome {
    let mut config = debug_llama(Dtype::Float64);
    config.training.max_norm = 0.0;
    let expected = on_rank_0(rank, || reference(&config))?;
    let mut config = outer(&divided(&config, rank.size(), 1), 2, 5);
    config.local_updates.start_step = config.training.steps;
    let run = train_on(rank, &config)?;
    assert_agrees(rank, &run, expected.as_ref(), "before the start step")?;
    config.local_updates.start_step = 10;
    let local = train_on(rank, &config)?;
    assert!(
        local.losses[..10] == run.losses[..10],
        "until the start step"
    );
    assert!(
        local.losses[11..] != run.losses[11..],
        "after the start step"
    );
    agreed_parameters(rank, &local)
}

/// Panics if parameters differ between ranks; losses are those of the own replica.
fn agreed_parameters(rank: &Rank, run: &Trained) -> Outcome {
    let same = Trained {
        losses: Vec::new(),
        grad_norms: Vec::new(),
        parameters: run
            .parameters
            .iter()
            .map(|(name, value)| (name.clone(), value.copy()))
            .collect(),
        totals: run.totals.clone(),
        ..*run
    };
    agreed_fingerprint(rank, &same)?;
    Ok(())
}

fn methods() -> Vec<(&'static str, Config)> {
    let with = |name, change: Change| {
        let mut config = debug_llama(Dtype::Float32);
        config.parallelism.data_parallel_outer_degree = 2;
        config.training.steps = 43;
        config.local_updates.sync_steps = 8;
        config.local_updates.method = LocalUpdateMethod::Diloco;
        change(&mut config);
        (name, config)
    };
    vec![
        with("local SGD", |c| {
            c.local_updates.method = LocalUpdateMethod::LocalSgd
        }),
        with("DiLoCo", |_| ()),
        with("DiLoCo of ZeRO 3", |c| {
            c.parallelism.data_parallel_shard_degree = -1
        }),
        with("Streaming DiLoCo", |c| {
            c.local_updates.num_fragments = 3;
            c.local_updates.fragment_sync_delay = 2;
            c.local_updates.fragment_update_alpha = 0.25;
        }),
        with("DiLoCo in int8", |c| {
            c.local_updates.compression = GradientCompression::Int8
        }),
        with("SparseLoCo", |c| {
            c.local_updates.method = LocalUpdateMethod::SparseLoco;
            c.local_updates.compression_ratio = 0.2;
        }),
    ]
}

/// All replicas end with the same parameters, after having sent nothing but outer gradients.
fn every_method(rank: &Rank) -> Outcome {
    let mut plain = debug_llama(Dtype::Float32);
    plain.training.steps = 43;
    let plain = train_on(rank, &divided(&plain, rank.size(), 1))?;
    let decrease = |run: &Trained| run.losses[0] - run.losses[run.losses.len() - 1];
    for (name, config) in methods() {
        let config = divided(&config, rank.size(), 1);
        let run = train_on(rank, &config)?;
        agreed_parameters(rank, &run)?;
        check_bytes(rank, &config, &run, name)?;
        let share = decrease(&run) / decrease(&plain);
        rank.note(format!("{name}: {share:.2} of the decrease"));
        assert!(
            share > 0.6,
            "{name} reaches {share} of the decrease of the loss"
        );
    }
    Ok(())
}

fn check_bytes(
    rank: &Rank,
    config: &Config,
    run: &Trained,
    name: &str,
) -> Result<(), Box<dyn Error>> {
    let own = run.totals.of_purpose(Purpose::OuterGradient).sent_bytes;
    let sent: u64 = rank.all_gather(&own)?.iter().sum();
    let by_formula = rank.all_gather(&run.outer_volume.gradients)?;
    // Every rank knows what all replicas of its shards send.
    let num_replicas = config.parallelism.data_parallel_outer_degree as u64;
    assert!(sent > 0, "{name} sends nothing");
    assert_eq!(
        sent,
        by_formula.iter().sum::<u64>() / num_replicas,
        "{name}"
    );
    // A dry run knows the mode: its second step is no outer step.
    let dry = dry_run(&config.into(), rank.size(), rank.index())?;
    let mut rows = dry.collectives.iter();
    assert!(
        !rows.any(|row| row.purpose == Purpose::OuterGradient),
        "{name}"
    );
    Ok(())
}
