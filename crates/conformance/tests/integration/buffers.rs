//! Running statistics of BatchNorm under data parallelism, and BatchNorm over the batches of all ranks.

use std::collections::BTreeMap;
use std::error::Error;
use std::process::Command;
use std::rc::Rc;

use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Tensor};
use trainyard_conformance::programs::{self, json, python, repository};
use trainyard_conformance::training::{on_rank_0, values};
use trainyard_conformance::{Case, Outcome, Rank, Suite, device};
use trainyard_cost::{CommCounts, CostModel, Stage};
use trainyard_nn::{
    Context, Model, Module, UnitFn, VarStoreModel, convert_sync_batchnorm, cross_entropy_sum, run,
};
use trainyard_optim::{Optimizer, Sgd};
use trainyard_parallel::{
    BroadcastBuffers, DataParallel, DataParallelWrapper, Ddp, DdpOptions, FullyShard, GradSync,
    Recompute, RecomputeHooks, RecomputePlan, Strategy,
};
use trainyard_torch::Group;
use trainyard_trace::Purpose;

use crate::convolutions::{
    Convolutions, NUM_CHANNELS, NUM_CLASSES, SGD, batch, ddp_options, for_each_stage,
    largest_distance, num_rows, probe, shard_options, sharded,
};

const NUM_STEPS: u64 = 3;

/// The same with `tch`: one convolution, with a norm over the batches of `group` or over the rank's own.
fn tch_model(group: Option<&Group>, device: Device) -> Result<VarStoreModel, Box<dyn Error>> {
    let mut vs = nn::VarStore::new(device);
    let config = nn::BatchNormConfig {
        ws_init: nn::Init::Const(1.0),
        ..Default::default()
    };
    let conv = nn::conv2d(
        vs.root() / "conv",
        1,
        NUM_CLASSES as i64,
        3,
        Default::default(),
    );
    let norm = nn::batch_norm2d(vs.root() / "norm", NUM_CLASSES as i64, config);
    vs.double();
    fill(&vs)?;
    let norm: Box<dyn ModuleT> = match group {
        Some(group) => Box::new(convert_sync_batchnorm(norm, config, group)?),
        None => Box::new(norm),
    };
    let units: Vec<(&str, UnitFn)> = vec![
        ("conv", Box::new(move |x, _| conv.forward_t(x, true))),
        (
            "norm",
            Box::new(move |x, cx| norm.forward_t(x, cx.training)),
        ),
        (
            "pool",
            Box::new(|x, _| x.mean_dim([2i64, 3].as_slice(), false, x.kind())),
        ),
    ];
    let loss = |output: &Tensor, targets: &Tensor| cross_entropy_sum(output, targets).unwrap();
    Ok(VarStoreModel::new(&vs, units, Box::new(loss))?)
}

/// The same weights on every rank.
fn fill(vs: &nn::VarStore) -> Outcome {
    for mut weight in vs.trainable_variables() {
        let waves = Tensor::arange(weight.numel() as i64, (Kind::Double, weight.device()));
        tch::no_grad(|| weight.f_copy_(&(waves * 1.7 + 0.3).sin().view_as(&weight)))?;
    }
    Ok(())
}

/// The state after some steps and the output of an evaluation.
type Trained = (BTreeMap<String, Tensor>, Tensor);

fn train(
    model: &dyn DataParallelWrapper,
    num_ranks: usize,
    index: usize,
) -> Result<(), Box<dyn Error>> {
    let mut sgd = Sgd::new(model.parameters(), SGD);
    for step in 0..NUM_STEPS {
        model.zero_grad()?;
        let (x, classes) = batch(index, step);
        let run = model.forward(&x.to_device(device()), &Context::training(step))?;
        let sum = model.loss(run.output(), &classes.to_device(device()))?;
        model.backward(run, &(sum / num_rows(num_ranks)), GradSync::Full)?;
        sgd.step(0.1)?;
    }
    Ok(())
}

fn evaluated(model: &dyn DataParallelWrapper) -> Result<Tensor, Box<dyn Error>> {
    let cx = Context::evaluation(NUM_STEPS);
    let output = tch::no_grad(|| model.forward(&probe().to_device(device()), &cx))?.into_output();
    Ok(output.to_device(Device::Cpu))
}

/// The whole batch on one rank.
fn one_rank(model: &impl Model, num_ranks: usize) -> Result<Trained, Box<dyn Error>> {
    let mut sgd = Sgd::new(model.parameters(), SGD);
    for step in 0..NUM_STEPS {
        for parameter in model.parameters() {
            trainyard_torch::autograd::clear_grad(parameter.tensor())?;
        }
        let (x, classes): (Vec<_>, Vec<_>) = (0..num_ranks).map(|index| batch(index, step)).unzip();
        let pass = run(model, &Tensor::cat(&x, 0), &Context::training(step), &[])?;
        let sum = model.loss(pass.output(), &Tensor::cat(&classes, 0))?;
        pass.backward(&(sum / num_rows(num_ranks)))?;
        sgd.step(0.1)?;
    }
    let cx = Context::evaluation(NUM_STEPS);
    let output = tch::no_grad(|| run(model, &probe(), &cx, &[]))?.into_output();
    Ok((values(&model.parameters()), output))
}

/// Asserts that all ranks have the same running statistics and evaluate alike, bit by bit.
fn assert_same_on_all_ranks(rank: &Rank, model: &dyn DataParallelWrapper) -> Outcome {
    let mut found = vec![Vec::<f64>::try_from(evaluated(model)?.flatten(0, -1))?];
    for stat in model.parameters().iter().filter(|p| p.is_running_stat()) {
        found.push(Vec::try_from(stat.tensor().to_device(Device::Cpu))?);
    }
    assert!(found.len() > 2, "no running statistics");
    let bits: Vec<Vec<u64>> = found
        .iter()
        .map(|values| values.iter().map(|value| value.to_bits()).collect())
        .collect();
    let all = rank.all_gather(&bits)?;
    assert!(all.iter().all(|each| *each == all[0]), "ranks differ");
    Ok(())
}

/// Each rank sees other rows, so without a broadcast their statistics would drift apart.
fn ranks_agree(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    let ddp = Ddp::new(tch_model(None, device())?, &group, ddp_options())?;
    train(&ddp, rank.size(), rank.index())?;
    assert_same_on_all_ranks(rank, &ddp)?;
    let world = sharded(rank)?;
    for stage in [Stage::OptimizerStates, Stage::Gradients, Stage::Parameters] {
        let model = Convolutions::build(None, device())?;
        let model = FullyShard::new(model, &world, shard_options(stage))?;
        train(&model, rank.size(), rank.index())?;
        assert_same_on_all_ranks(rank, &model)?;
    }
    Ok(())
}

fn on_request(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    let ignored = BroadcastBuffers {
        ignored: vec!["norm.running_mean".to_owned()],
        ..BroadcastBuffers::default()
    };
    let off = BroadcastBuffers {
        enable: false,
        ..BroadcastBuffers::default()
    };
    for (options, same) in [(ignored, vec!["norm.running_var"]), (off, vec![])] {
        let options = DdpOptions {
            broadcast_buffers: options,
            ..ddp_options()
        };
        let model = Ddp::new(tch_model(None, device())?, &group, options)?;
        train(&model, rank.size(), rank.index())?;
        let _ = evaluated(&model)?;
        for stat in model.parameters().iter().filter(|p| p.is_running_stat()) {
            let all =
                rank.all_gather(&Vec::<f64>::try_from(stat.tensor().to_device(Device::Cpu))?)?;
            let is_same = all.iter().all(|each| *each == all[0]);
            assert_eq!(is_same, same.contains(&stat.name()), "{}", stat.name());
        }
    }
    Ok(())
}

/// Accumulated passes broadcast once, and a pass may come before the backward of another.
fn bytes(rank: &Rank) -> Outcome {
    let world = rank.world()?;
    let group = world.world_group()?;
    let model = Ddp::new(Convolutions::build(None, device())?, &group, ddp_options())?;
    let before = world.ledger().totals();
    let (x, classes) = batch(rank.index(), 0);
    let forward = || -> Result<_, Box<dyn Error>> {
        let run = model.forward(&x.to_device(device()), &Context::training(0))?;
        let loss = model.loss(run.output(), &classes.to_device(device()))?;
        Ok((run, loss))
    };
    let ((first, first_loss), (second, second_loss)) = (forward()?, forward()?);
    model.backward(first, &first_loss, GradSync::None)?;
    model.backward(second, &second_loss, GradSync::Full)?;
    model.wait_pending()?;
    model.wait_pending()?;
    let totals = world.ledger().totals() - before;
    let sent = totals.of_purpose(Purpose::Parameter).sent_bytes;
    let sent: u64 = rank.all_gather(&sent)?.iter().sum();
    let num_channels = 2 * NUM_CHANNELS + NUM_CLASSES;
    let expected = (rank.size() - 1) * 2 * num_channels * size_of::<f64>();
    assert_eq!(sent, expected as u64);
    let volume = model.volume(CommCounts::per_microbatch(2), rank.size());
    assert_eq!(volume.parameters, expected as u64);
    Ok(())
}

/// Asserts the values of `full` and the evaluation of one rank with the whole batch.
fn assert_equals_one_rank(
    rank: &Rank,
    model: &dyn DataParallelWrapper,
    full: &[trainyard_nn::Parameter],
    expected: &Trained,
) -> Outcome {
    train(model, rank.size(), rank.index())?;
    let output = evaluated(model)?;
    let found = values(full);
    let off = largest_distance(&found, &expected.0);
    let output_off = (output - &expected.1).abs().max().double_value(&[]);
    rank.note(format!("state {off:.1e}, evaluation {output_off:.1e}"));
    assert!(off < 1e-9 && output_off < 1e-9, "{off:e}, {output_off:e}");
    Ok(())
}

fn synchronized(rank: &Rank) -> Outcome {
    let expected = one_rank(&Convolutions::build(None, Device::Cpu)?, rank.size())?;
    let group = rank.world()?.world_group()?;
    let ddp = Ddp::new(
        Convolutions::build(Some(&group), device())?,
        &group,
        ddp_options(),
    )?;
    assert_equals_one_rank(rank, &ddp, &ddp.model().parameters(), &expected)?;
    for_each_stage(rank, |model, _, full| {
        assert_equals_one_rank(rank, model, full, &expected)
    })
}

fn converted(rank: &Rank) -> Outcome {
    let expected = one_rank(&tch_model(None, Device::Cpu)?, rank.size())?;
    let group = rank.world()?.world_group()?;
    let model = Ddp::new(tch_model(Some(&group), device())?, &group, ddp_options())?;
    assert_equals_one_rank(rank, &model, &model.model().parameters(), &expected)
}

/// Backward runs a unit again, but its batch counts once.
fn recomputed(rank: &Rank) -> Outcome {
    let expected = one_rank(&Convolutions::build(None, Device::Cpu)?, rank.size())?;
    let group = rank.world()?.world_group()?;
    let model = Rc::new(Convolutions::build(Some(&group), device())?);
    let plan = RecomputePlan::every(1, Recompute::Full, model.units().len());
    let model: Rc<dyn Model> = model;
    let options = DdpOptions {
        unit_hooks: vec![Rc::new(RecomputeHooks::new(Rc::clone(&model), plan))],
        ..ddp_options()
    };
    let ddp = Ddp::new(model, &group, options)?;
    assert_equals_one_rank(rank, &ddp, &ddp.model().parameters(), &expected)
}

/// The statistics of the model are those of its own thread, as if it were alone with its rows.
fn threads(rank: &Rank) -> Outcome {
    let stats_of = |num_replicas: usize| -> Result<_, Box<dyn Error>> {
        let build = |_| Convolutions::build(None, device());
        let model = DataParallel::new(build(0)?, num_replicas, build)?;
        let (x, classes) = batch(0, 0);
        let repeat = |t: &Tensor| Tensor::cat(&vec![t; num_replicas], 0);
        let _ = model.step(&repeat(&x), &repeat(&classes), 0)?;
        let mut state = values(&model.model().parameters());
        state.retain(|name, _| name.contains("running"));
        Ok(state)
    };
    let off = largest_distance(&stats_of(3)?, &stats_of(1)?);
    rank.note(format!("{off:.1e}"));
    assert!(off < 1e-12, "{off:e}");
    Ok(())
}

/// What PyTorch has after the same steps, under each of its strategies: parameters, buffers and an evaluation.
type PeerStates = BTreeMap<String, BTreeMap<String, Vec<f64>>>;

/// Runs PyTorch's DDP and `fully_shard` on as many ranks, from the weights of `model`.
fn train_in_pytorch(model: &impl Model, num_ranks: usize) -> Result<PeerStates, Box<dyn Error>> {
    let mut weights = BTreeMap::new();
    for (name, tensor) in values(&model.parameters()) {
        weights.insert(name, Vec::<f64>::try_from(tensor.flatten(0, -1))?);
    }
    let file = tempfile::NamedTempFile::new()?;
    serde_json::to_writer(&file, &weights)?;
    let mut peer = Command::new(python()?);
    peer.args(["-m", "torch.distributed.run", "--standalone"])
        .arg(format!("--nproc-per-node={num_ranks}"))
        .arg(repository("bench/peers/batch_norm.py"))
        .arg(file.path())
        .env("OMP_NUM_THREADS", "1");
    Ok(json(&programs::run(&mut peer)?)?)
}

/// The largest relative distance of tensors to those of PyTorch.
fn distance_to_peer(found: &BTreeMap<String, Tensor>, peer: &BTreeMap<String, Vec<f64>>) -> f64 {
    let expected = found.iter().map(|(name, tensor)| {
        let expected = Tensor::from_slice(&peer[name]).view_as(tensor);
        (name.clone(), expected)
    });
    largest_distance(found, &expected.collect())
}

/// PyTorch's DDP and `fully_shard` with the same weights and batches. Rank 0 compares its statistics: those of
/// `fully_shard` differ between ranks, and so does what its ranks evaluate.
fn as_in_pytorch(rank: &Rank) -> Outcome {
    if let Err(reason) = python() {
        rank.note(format!("SKIPPED: {reason}"));
        return Ok(());
    }
    let build = || Convolutions::build(None, device());
    let peer = on_rank_0(rank, || train_in_pytorch(&build()?, rank.size()))?;
    let group = rank.world()?.world_group()?;
    let world = sharded(rank)?;
    let replicated = Ddp::new(build()?, &group, ddp_options())?;
    let sharded = FullyShard::new(build()?, &world, shard_options(Stage::Parameters))?;
    let models: [(&str, &dyn DataParallelWrapper); 2] = [("ddp", &replicated), ("fsdp2", &sharded)];
    for (strategy, model) in models {
        train(model, rank.size(), rank.index())?;
        let mut found = values(&model.parameters());
        found.retain(|name, _| strategy == "ddp" || name.contains("running"));
        found.insert("evaluation".to_owned(), evaluated(model)?);
        if let Some(peer) = &peer {
            let off = distance_to_peer(&found, &peer[strategy]);
            rank.note(format!("{strategy} {off:.1e}"));
            assert!(off < 1e-9, "{strategy}: {off:e}");
        }
    }
    Ok(())
}

const BUFFERS: &[Case] = &[
    Case {
        name: "ddp_and_fully_shard_train_as_in_pytorch",
        run: as_in_pytorch,
    },
    Case {
        name: "running_statistics_are_the_same_on_all_ranks",
        run: ranks_agree,
    },
    Case {
        name: "buffers_are_kept_apart_on_request",
        run: on_request,
    },
    Case {
        name: "bytes_equal_the_closed_form",
        run: bytes,
    },
];

const SYNC_BATCH_NORM: &[Case] = &[
    Case {
        name: "equals_one_rank_with_the_whole_batch",
        run: synchronized,
    },
    Case {
        name: "a_converted_tch_model_equals_one_rank",
        run: converted,
    },
    Case {
        name: "a_recomputed_unit_updates_statistics_once",
        run: recomputed,
    },
];

const IN_ONE_PROCESS: &[Case] = &[Case {
    name: "replicas_do_not_touch_the_statistics_of_the_model",
    run: threads,
}];

/// The suites of this module.
pub const SUITES: &[Suite] = &[
    Suite {
        name: "buffers::broadcast",
        sizes: &[2],
        full_sizes: &[3],
        cases: BUFFERS,
        also_over_network: false,
    },
    Suite {
        name: "buffers::sync_batch_norm",
        sizes: &[2],
        full_sizes: &[3, 4],
        cases: SYNC_BATCH_NORM,
        also_over_network: false,
    },
    Suite {
        name: "buffers::data_parallel",
        sizes: &[1],
        full_sizes: &[],
        cases: IN_ONE_PROCESS,
        also_over_network: false,
    },
];
