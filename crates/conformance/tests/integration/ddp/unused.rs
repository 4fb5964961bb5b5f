//! Parameters that no rank uses, or that only some ranks use.

use std::error::Error;

use tch::{Device, Kind, Tensor};
use trainyard_conformance::{Outcome, Rank, device};
use trainyard_nn::{Builder, Context, Init, Model, Module, NnError, Parameter, Unit, run};
use trainyard_parallel::{
    BucketLimits, DataParallelWrapper, Ddp, DdpOptions, GradSync, ParallelError, Strategy,
};
use trainyard_torch::ReduceOp;

/// The branches that a rank uses, and the expected gradients.
type BranchUse = (Box<dyn Fn(usize) -> f64>, &'static [&'static str]);

/// The first element of a row selects its branch.
const USES_ALWAYS: f64 = 0.0;
const USES_SOMETIMES: f64 = 1.0;
const USES_ALL: f64 = 2.0;

const WIDTH: usize = 5;

/// Three branches, of which a batch uses only those that its rows select.
#[derive(Module)]
struct Branches {
    unit: Branching,
}

/// Fields in this order, so that the gradient that is always there is reduced first.
#[derive(Module)]
struct Branching {
    name: String,
    rarely: Parameter,
    sometimes: Parameter,
    always: Parameter,
}

impl Branches {
    fn build(device: Device) -> trainyard_nn::Result<Branches> {
        let builder = Builder::new(5).kind(Kind::Double).device(device.into());
        let parameter =
            |name: &str| builder.parameter(name, &[WIDTH], Init::Uniform { bound: 1.0 });
        Ok(Branches {
            unit: Branching {
                name: "unit".to_owned(),
                rarely: parameter("rarely")?,
                sometimes: parameter("sometimes")?,
                always: parameter("always")?,
            },
        })
    }
}

impl Unit for Branching {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, _: &Context) -> Result<Tensor, NnError> {
        let selected = x.f_narrow(1, 0, 1)?;
        let mut y = x.f_matmul(&self.always.value()?)?;
        for (branch, least) in [(&self.sometimes, USES_SOMETIMES), (&self.rarely, USES_ALL)] {
            let wanting = selected.f_ge(least)?.f_to_kind(Kind::Double)?;
            if wanting.sum(Kind::Double).double_value(&[]) > 0.0 {
                y = y.f_add(&x.f_mul(&wanting)?.f_matmul(&branch.value()?)?)?;
            }
        }
        Ok(y)
    }
}

impl Model for Branches {
    fn units(&self) -> Vec<&dyn Unit> {
        vec![&self.unit]
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> Result<Tensor, NnError> {
        Ok(output.f_sub(targets)?.f_square()?.f_sum(Kind::Double)?)
    }
}

/// Two rows of a rank in a step; the first one selects a branch.
fn rows(rank: usize, step: usize, selected: f64) -> Tensor {
    let numbers = Tensor::arange(2 * WIDTH as i64, (Kind::Double, Device::Cpu));
    let x = (numbers * (1.3 + rank as f64 + 7.0 * step as f64))
        .sin()
        .view([2, WIDTH as i64]);
    let _ = x.narrow(1, 0, 1).fill_(0.0);
    let _ = x.get(0).get(0).fill_(selected);
    x
}

/// One bucket per parameter, so that some are reduced while others are incomplete.
const SEPARATE: BucketLimits = BucketLimits { first: 1, rest: 1 };

fn wrap(
    rank: &Rank,
    find_unused_parameters: bool,
    buckets: BucketLimits,
) -> Result<Ddp<Branches>, Box<dyn Error>> {
    let options = DdpOptions {
        op: ReduceOp::Sum,
        find_unused_parameters,
        buckets,
        ..DdpOptions::default()
    };
    Ok(Ddp::new(
        Branches::build(device())?,
        &rank.world()?.world_group()?,
        options,
    )?)
}

fn backward(
    model: &Ddp<Branches>,
    x: &Tensor,
    sync: GradSync,
) -> trainyard_parallel::Result<Vec<String>> {
    let run = model.forward(&x.to_device(device()), &Context::training(0))?;
    let targets = Tensor::ones([2], (Kind::Double, device()));
    let loss = model.loss(run.output(), &targets)?;
    model.backward(run, &loss, sync)
}

type Gradients = Vec<(String, Option<Vec<f64>>)>;

fn gradients(model: &dyn Module) -> Result<Gradients, Box<dyn Error>> {
    let of = |parameter: &Parameter| {
        let gradient = parameter.tensor().grad();
        let values = gradient
            .defined()
            .then(|| Vec::<f64>::try_from(gradient))
            .transpose()?;
        Ok((parameter.name().to_owned(), values))
    };
    model.parameters().iter().map(of).collect()
}

/// The gradients of the rows of all ranks, computed on one rank.
fn expected(batches: &[Tensor]) -> Result<Gradients, Box<dyn Error>> {
    let model = Branches::build(Device::Cpu)?;
    let x = Tensor::cat(batches, 0);
    let pass = run(&model, &x, &Context::training(0), &[])?;
    let targets = Tensor::ones(x.size()[0], (Kind::Double, Device::Cpu));
    let loss = model.loss(pass.output(), &targets)?;
    pass.backward(&loss)?;
    gradients(&model)
}

/// Asserts the expected gradients, none for unused parameters, and the same bits on all ranks.
fn assert_equals_one_rank(rank: &Rank, model: &Ddp<Branches>, batches: &[Tensor]) -> Outcome {
    let found = gradients(model)?;
    for ((name, found), (_, expected)) in found.iter().zip(expected(batches)?) {
        match (found, expected) {
            (Some(found), Some(expected)) => {
                let off = found
                    .iter()
                    .zip(&expected)
                    .map(|(f, e)| (f - e).abs())
                    .fold(0.0, f64::max);
                assert!(off < 1e-9, "{name} is {found:?}, not {expected:?}");
            }
            (found, expected) => assert_eq!(found, &expected, "{name}"),
        }
    }
    let bits = |g: &Gradients| -> Vec<u64> {
        g.iter()
            .flat_map(|(_, v)| v.iter().flatten().map(|x| x.to_bits()))
            .collect()
    };
    let all = rank.all_gather(&bits(&found))?;
    assert!(all.iter().all(|each| *each == all[0]), "ranks differ");
    Ok(())
}

/// The branches that ranks use in a step, which determine their rows.
fn batches(rank: &Rank, step: usize, selected: impl Fn(usize) -> f64) -> Vec<Tensor> {
    (0..rank.size())
        .map(|index| rows(index, step, selected(index)))
        .collect()
}

/// One bucket, which is never complete: no rank waits for another one that failed.
pub fn named(rank: &Rank) -> Outcome {
    let model = wrap(rank, false, BucketLimits::default())?;
    let selected = if rank.index() == 0 {
        USES_SOMETIMES
    } else {
        USES_ALWAYS
    };
    let error = backward(&model, &rows(rank.index(), 0, selected), GradSync::Full)
        .err()
        .ok_or("it was accepted")?;
    let ParallelError::UnusedParameters { mut names } = error else {
        return Err(error.into());
    };
    names.sort();
    let expected: &[&str] = if rank.index() == 0 {
        &["rarely"]
    } else {
        &["rarely", "sometimes"]
    };
    assert_eq!(names, expected);
    let text = ParallelError::UnusedParameters { names }.to_string();
    assert!(
        text.contains("rarely") && text.contains("find_unused_parameters = true"),
        "{text}"
    );
    Ok(())
}

/// The state of a rejected pass must not leak into the next one.
pub fn after_rejection(rank: &Rank) -> Outcome {
    let model = wrap(rank, false, SEPARATE)?;
    assert!(backward(&model, &rows(rank.index(), 0, USES_ALWAYS), GradSync::Full).is_err());
    for step in 1..3 {
        model.zero_grad()?;
        let batches = batches(rank, step, |_| USES_ALL);
        backward(&model, &batches[rank.index()], GradSync::Full)?;
        assert_equals_one_rank(rank, &model, &batches)?;
    }
    Ok(())
}

pub fn handled(rank: &Rank) -> Outcome {
    let model = wrap(rank, true, SEPARATE)?;
    for step in 0..3 {
        model.zero_grad()?;
        let batches = batches(rank, step, |_| USES_SOMETIMES);
        let unused = backward(&model, &batches[rank.index()], GradSync::Full)?;
        assert_eq!(unused, ["rarely"]);
        assert_equals_one_rank(rank, &model, &batches)?;
    }
    Ok(())
}

/// In turn: used on one rank, on none, on all, on another rank; and in an accumulated micro-batch only.
pub fn come_and_go(rank: &Rank) -> Outcome {
    let model = wrap(rank, true, SEPARATE)?;
    let last = rank.size() - 1;
    let only = move |chosen: usize, selected: f64| {
        move |index: usize| {
            if index == chosen {
                selected
            } else {
                USES_ALWAYS
            }
        }
    };
    let branch_uses: [BranchUse; 5] = [
        (Box::new(only(0, USES_SOMETIMES)), &["rarely"]),
        (Box::new(|_| USES_ALWAYS), &["rarely", "sometimes"]),
        (Box::new(|_| USES_ALL), &[]),
        (Box::new(only(last, USES_ALL)), &[]),
        (Box::new(only(last, USES_SOMETIMES)), &["rarely"]),
    ];
    for (step, (selected, unused)) in branch_uses.iter().enumerate() {
        model.zero_grad()?;
        let batches = batches(rank, step, selected);
        let mut found = backward(&model, &batches[rank.index()], GradSync::Full)?;
        found.sort();
        assert_eq!(&found, unused, "step {step}");
        assert_equals_one_rank(rank, &model, &batches)?;
    }
    model.zero_grad()?;
    let mut all = batches(rank, 7, only(1, USES_ALL));
    backward(&model, &all[rank.index()], GradSync::ShardOnly)?;
    let second = batches(rank, 8, |_| USES_ALWAYS);
    assert_eq!(
        backward(&model, &second[rank.index()], GradSync::Full)?,
        [""; 0]
    );
    all.extend(second);
    assert_equals_one_rank(rank, &model, &all)
}
