//! One-line wraps of any sequential model, compared with one rank.

use std::error::Error;
use std::time::Duration;

use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Tensor};
use trainyard_conformance::training::values;
use trainyard_conformance::{Case, Outcome, Rank, Suite, device};
use trainyard_mesh::{Axis, Mesh};
use trainyard_nn::ParallelStyle::{Colwise, Rowwise};
use trainyard_nn::{
    Context, Model, Module, NnError, UnitFn, VarStoreModel, cross_entropy_sum, parallelize, run,
};
use trainyard_optim::{Optimizer, Sgd};
use trainyard_parallel::{
    Cut, DataParallelWrapper, Ddp, DdpOptions, GradSync, PipelineOptions, Strategy, WrapPolicy,
    fully_shard, pipeline,
};
use trainyard_schedule::ScheduleKind;
use trainyard_torch::World;
use trainyard_trace::Ledger;

use crate::convolutions::{SGD, largest_distance};

const NUM_STEPS: u64 = 6;
const NUM_ROWS: i64 = 12;
const SIDE: i64 = 6;
const NUM_CLASSES: i64 = 6;
const TIMEOUT: Duration = Duration::from_secs(30);

/// A convolution and three linear layers, written with `tch`.
fn model(device: Device) -> Result<VarStoreModel, Box<dyn Error>> {
    let mut vs = nn::VarStore::new(device);
    let padded = nn::ConvConfig {
        padding: 1,
        ..Default::default()
    };
    let conv = nn::conv2d(vs.root() / "conv", 1, 12, 3, padded);
    let fc1 = nn::linear(vs.root() / "fc1", 12 * SIDE * SIDE, 24, Default::default());
    let fc2 = nn::linear(vs.root() / "fc2", 24, 12, Default::default());
    let head = nn::linear(vs.root() / "head", 12, NUM_CLASSES, Default::default());
    vs.double();
    for (index, mut weight) in vs.trainable_variables().into_iter().enumerate() {
        let waves = Tensor::arange(weight.numel() as i64, (Kind::Double, weight.device()));
        // No period of it is one of a row.
        let values = (waves.square() * 0.0137 + waves * 1.7 + index as f64).sin();
        let fan_in = weight.numel() as f64 / weight.size()[0] as f64;
        tch::no_grad(|| weight.f_copy_(&(values.view_as(&weight) * (3.0 / fan_in).sqrt())))?;
    }
    let units: Vec<(&str, UnitFn)> = vec![
        ("conv", Box::new(move |x, _| conv.forward_t(x, true).relu())),
        (
            "fc1",
            Box::new(move |x, _| fc1.forward_t(&x.flatten(1, -1), true).relu()),
        ),
        ("fc2", Box::new(move |x, _| fc2.forward_t(x, true))),
        (
            "head",
            Box::new(move |x, _| head.forward_t(&x.relu(), true)),
        ),
    ];
    let loss = |output: &Tensor, targets: &Tensor| cross_entropy_sum(output, targets).unwrap();
    Ok(VarStoreModel::new(&vs, units, Box::new(loss))?)
}

fn batch(step: u64) -> (Tensor, Tensor) {
    let shape = [NUM_ROWS, 1, SIDE, SIDE];
    let count = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    let x = ((count + 100.0 * (step % 2) as f64) * 0.37).sin();
    let classes = Tensor::arange(NUM_ROWS, (Kind::Int64, Device::Cpu));
    (
        x.view(shape).to_device(device()),
        classes.remainder(NUM_CLASSES).to_device(device()),
    )
}

/// The losses of one rank, and its parameters.
fn expected() -> Result<(Vec<f64>, VarStoreModel), Box<dyn Error>> {
    let model = model(device())?;
    let mut sgd = Sgd::new(model.parameters(), SGD);
    let mut losses = Vec::new();
    for step in 0..NUM_STEPS {
        for parameter in model.parameters() {
            trainyard_torch::autograd::clear_grad(parameter.tensor())?;
        }
        let (x, classes) = batch(step);
        let pass = run(&model, &x, &Context::training(step), &[])?;
        let loss = model.loss(pass.output(), &classes)? / NUM_ROWS as f64;
        losses.push(loss.double_value(&[]));
        pass.backward(&loss)?;
        sgd.step(0.1)?;
    }
    assert!(losses[losses.len() - 1] < 0.9 * losses[0], "{losses:?}");
    Ok((losses, model))
}

fn joined(rank: &Rank, axis: Axis) -> Result<std::rc::Rc<World>, Box<dyn Error>> {
    let mesh = Mesh::new(&[(axis, rank.size())])?;
    Ok(rank.join(mesh, Ledger::new(rank.index()), TIMEOUT)?)
}

/// The losses of a wrapped model, of which every rank has the whole batch.
fn losses(model: &dyn DataParallelWrapper) -> Result<Vec<f64>, Box<dyn Error>> {
    let mut sgd = Sgd::new(model.parameters(), SGD);
    let mut losses = Vec::new();
    for step in 0..NUM_STEPS {
        model.zero_grad()?;
        let (x, classes) = batch(step);
        let pass = model.forward(&x, &Context::training(step))?;
        let loss = model.loss(pass.output(), &classes)? / NUM_ROWS as f64;
        losses.push(loss.double_value(&[]));
        model.backward(pass, &loss, GradSync::Full)?;
        sgd.step(0.1)?;
    }
    Ok(losses)
}

fn assert_close(rank: &Rank, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    let off = found.iter().zip(expected).map(|(f, e)| (f - e).abs());
    let off = off.fold(0.0, f64::max);
    rank.note(format!("losses {off:.1e}"));
    assert!(off < 1e-9, "{found:?}, not {expected:?}");
}

fn tensor_parallel(rank: &Rank) -> Outcome {
    let (expected, one_rank) = expected()?;
    let world = joined(rank, Axis::Tp)?;
    let tp = world.group(Axis::Tp)?;
    let plan = [
        ("conv", Colwise.gather_output()),
        ("fc1", Colwise),
        ("fc2", Rowwise),
        ("head", Colwise.gather_output()),
    ];
    let model = parallelize(model(device())?, &tp, plan)?;
    let replicas = world.group(Axis::DpReplicate)?;
    let model = Ddp::new(model, &replicas, DdpOptions::default())?;
    assert_close(rank, &losses(&model)?, &expected);
    // Every rank has its shard of the weights of one rank.
    let full = values(&one_rank.parameters());
    for parameter in model.parameters() {
        let mut shard = full[parameter.name()].shallow_clone();
        for (dim, &length) in parameter.tensor().size().iter().enumerate() {
            if length < shard.size()[dim] {
                shard = shard.narrow(dim as i64, rank.index() as i64 * length, length);
            }
        }
        let found = parameter.tensor().detach().to_device(Device::Cpu);
        let off = (found - shard).abs().max().double_value(&[]);
        assert!(off < 1e-9, "{}: {off:e}", parameter.name());
    }
    Ok(())
}

fn rejected_plans(rank: &Rank) -> Outcome {
    let tp = joined(rank, Axis::Tp)?.group(Axis::Tp)?;
    let unknown = parallelize(model(device())?, &tp, [("fc3", Colwise)]);
    assert!(matches!(unknown, Err(NnError::UnknownUnit { name, .. }) if name == "fc3"));
    Ok(())
}

fn pipelines(rank: &Rank) -> Outcome {
    let (expected, one_rank) = expected()?;
    let world = joined(rank, Axis::Pp)?;
    let kinds = [
        (ScheduleKind::OneForwardOneBackward, Cut::Flops),
        (ScheduleKind::GPipe, Cut::Parameters),
        (ScheduleKind::ZeroBubbleH1, Cut::Measured),
    ];
    for (schedule, cut) in kinds {
        let options = PipelineOptions {
            chunks: 4,
            schedule,
            cut,
            ..PipelineOptions::default()
        };
        let microbatch = batch(0).0.narrow(0, 0, NUM_ROWS / 4);
        let model = pipeline(model(device())?, &world, &microbatch, options)?;
        let mut sgd = Sgd::new(model.parameters(), SGD);
        let mut losses = Vec::new();
        for step in 0..NUM_STEPS {
            model.zero_grad()?;
            let (x, classes) = batch(step);
            let loss = model.step(&x, &classes, step)?;
            losses.extend(loss.map(|loss| loss.double_value(&[])));
            sgd.step(0.1)?;
        }
        if rank.index() + 1 == rank.size() {
            assert_close(rank, &losses, &expected);
        }
        let own = values(&model.parameters());
        assert!(!own.is_empty() && own.len() < one_rank.parameters().len());
        let off = largest_distance(&own, &values(&one_rank.parameters()));
        assert!(off < 1e-9, "{off:e}");
    }
    Ok(())
}

fn wrap_policies(rank: &Rank) -> Outcome {
    let (expected, _) = expected()?;
    let world = joined(rank, Axis::DpShard)?;
    let policies = [
        WrapPolicy::EveryUnit,
        WrapPolicy::MaxBytes(90_000),
        WrapPolicy::MinParameters(400),
        WrapPolicy::Types(vec!["AdaptedUnit".to_owned()]),
    ];
    for policy in policies {
        let model = fully_shard(model(device())?, &world, policy)?;
        assert_close(rank, &losses(&model)?, &expected);
    }
    Ok(())
}

const WRAPS: &[Case] = &[
    Case {
        name: "parallelize_equals_one_rank",
        run: tensor_parallel,
    },
    Case {
        name: "a_plan_with_an_unknown_unit_is_rejected",
        run: rejected_plans,
    },
    Case {
        name: "pipeline_equals_one_rank",
        run: pipelines,
    },
    Case {
        name: "fully_shard_equals_one_rank_with_every_policy",
        run: wrap_policies,
    },
];

/// The suites of this module.
pub const SUITES: &[Suite] = &[Suite {
    name: "wraps::any_model",
    sizes: &[2],
    full_sizes: &[3],
    cases: WRAPS,
    also_over_network: false,
}];
