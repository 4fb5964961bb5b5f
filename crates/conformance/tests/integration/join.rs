//! Ranks with different numbers of batches, compared with one rank that has the batches of all.

use std::error::Error;
use std::time::{Duration, Instant};

use tch::{Device, Tensor};
use trainyard_conformance::training::values;
use trainyard_conformance::{Case, Outcome, Rank, Suite, device};
use trainyard_nn::{Context, Model, Module, Parameter, run};
use trainyard_optim::{Optimizer, Sgd};
use trainyard_parallel::{DataParallelWrapper, Ddp, GradSync, Join, ParallelError, Strategy};
use trainyard_torch::{Cause, Group, TorchError};

use crate::convolutions::{
    Convolutions, SGD, batch, ddp_options, for_each_stage, largest_distance, probe,
};

/// Far less than the timeout of collectives.
const AT_ONCE: Duration = Duration::from_secs(10);

/// Rank 0 has the most.
fn num_batches(num_ranks: usize, index: usize) -> u64 {
    1 + 2 * (num_ranks - index) as u64
}

/// The steps of one rank: each has the batches of the ranks that still have one.
fn expected(num_ranks: usize) -> Result<(Vec<Parameter>, Tensor), Box<dyn Error>> {
    let model = Convolutions::build(None, Device::Cpu)?;
    let mut sgd = Sgd::new(model.parameters(), SGD);
    for step in 0..num_batches(num_ranks, 0) {
        let active = (0..num_ranks).filter(|&index| step < num_batches(num_ranks, index));
        let (x, classes): (Vec<_>, Vec<_>) = active.map(|index| batch(index, step)).unzip();
        let classes = Tensor::cat(&classes, 0);
        for parameter in model.parameters() {
            trainyard_torch::autograd::clear_grad(parameter.tensor())?;
        }
        let pass = run(&model, &Tensor::cat(&x, 0), &Context::training(step), &[])?;
        let loss = model.loss(pass.output(), &classes)? / classes.numel() as f64;
        pass.backward(&loss)?;
        sgd.step(0.1)?;
    }
    let pass = tch::no_grad(|| run(&model, &probe(), &Context::evaluation(0), &[]))?;
    Ok((model.parameters(), pass.into_output()))
}

fn train(model: &dyn DataParallelWrapper, rank: &Rank, group: &Group) -> Outcome {
    let batches = (0..num_batches(rank.size(), rank.index()))
        .map(|step| batch(rank.index(), step))
        .map(|(x, classes)| (x.to_device(device()), classes.to_device(device())));
    let mut sgd = Sgd::new(model.parameters(), SGD);
    let mut join = Join::new(batches, group, |(_, classes)| classes.numel() as u64);
    let (mut num_steps, mut num_idle) = (0, 0);
    while let Some(step) = join.next()? {
        model.zero_grad()?;
        let (x, classes) = step.batch;
        let run = model.forward(x, &step.context())?;
        let loss = step.weighted(&model.loss(run.output(), classes)?)?;
        num_steps += 1;
        num_idle += u64::from(step.is_idle);
        model.backward(run, &loss, GradSync::Full)?;
        sgd.step(0.1)?;
    }
    assert_eq!(num_steps, num_batches(rank.size(), 0));
    assert_eq!(num_idle, num_steps - num_batches(rank.size(), rank.index()));
    Ok(())
}

fn assert_equals_one_rank(
    rank: &Rank,
    model: &dyn DataParallelWrapper,
    group: &Group,
    full: &[Parameter],
) -> Outcome {
    train(model, rank, group)?;
    let (parameters, output) = expected(rank.size())?;
    let cx = Context::evaluation(0);
    let found = tch::no_grad(|| model.forward(&probe().to_device(device()), &cx))?.into_output();
    let output_off = (found.to_device(Device::Cpu) - output).abs().max();
    let output_off = output_off.double_value(&[]);
    let off = largest_distance(&values(full), &values(&parameters));
    rank.note(format!("state {off:.1e}, evaluation {output_off:.1e}"));
    assert!(off < 1e-9 && output_off < 1e-9, "{off:e}, {output_off:e}");
    Ok(())
}

/// With norms over the batches of all ranks, which leave out those of idle ranks.
fn ddp(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    let model = Convolutions::build(Some(&group), device())?;
    let model = Ddp::new(model, &group, ddp_options())?;
    assert_equals_one_rank(rank, &model, &group, &model.model().parameters())
}

fn zero(rank: &Rank) -> Outcome {
    for_each_stage(rank, |model, group, full| {
        assert_equals_one_rank(rank, model, group, full)
    })
}

fn without_batches(rank: &Rank) -> Outcome {
    let group = rank.world()?.world_group()?;
    let number = usize::from(rank.index() == 0);
    let mut join = Join::new(vec![(); number], &group, |()| 1);
    match join.next() {
        Err(ParallelError::NoBatches { number, .. }) => assert_eq!(number, rank.size() as u64 - 1),
        Err(error) => return Err(error.into()),
        Ok(_) => return Err("it went on".into()),
    }
    Ok(())
}

/// Without `Join`, the last rank ends its loop and its process, which closes its connections.
fn early_end(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu("NCCL notices a lost peer by its timeout") {
        return Ok(());
    }
    let group = rank.world()?.world_group()?;
    let model = Convolutions::build(None, device())?;
    let model = Ddp::new(model, &group, ddp_options())?;
    let last = rank.size() - 1;
    let pass = |step: u64| {
        model.zero_grad()?;
        let (x, classes) = batch(rank.index(), step);
        let run = model.forward(&x.to_device(device()), &Context::training(step))?;
        let loss = model.loss(run.output(), &classes.to_device(device()))?;
        model.backward(run, &loss, GradSync::Full)
    };
    pass(0)?;
    if rank.index() == last {
        group.abort();
    } else {
        let began = Instant::now();
        let error = pass(1)
            .err()
            .ok_or("the step succeeded without the last rank")?;
        assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
        rank.note(error.to_string());
        let ParallelError::Torch(TorchError::Communication(error)) = error else {
            return Err(error.into());
        };
        let Cause::PeerLost { ranks, .. } = &error.cause else {
            return Err(error.into());
        };
        assert!(ranks.contains(&last), "{ranks:?}");
    }
    rank.barrier()?;
    Ok(())
}

const UNEVEN: &[Case] = &[
    Case {
        name: "ddp_equals_one_rank",
        run: ddp,
    },
    Case {
        name: "zero_equals_one_rank",
        run: zero,
    },
    Case {
        name: "a_rank_without_batches_is_an_error_on_all_ranks",
        run: without_batches,
    },
    Case {
        name: "without_join_a_rank_that_ends_early_is_named",
        run: early_end,
    },
];

/// The suites of this module.
pub const SUITES: &[Suite] = &[Suite {
    name: "join::uneven_inputs",
    sizes: &[2, 3],
    full_sizes: &[4],
    cases: UNEVEN,
    also_over_network: false,
}];
