//! Parameters that take no part in the loss: on no rank, or on some.

use std::error::Error;

use tch::{Device, Kind, Tensor};
use trainyard_conformance::{Outcome, Rank};
use trainyard_nn::{Builder, Context, Init, Model, Module, NnError, Parameter, Unit, run};
use trainyard_parallel::{BucketLimits, Ddp, DdpOptions, ParallelError, Strategy, Sync};
use trainyard_torch::ReduceOp;

/// What a rank asks for, and what must come of it.
type Wish = (Box<dyn Fn(usize) -> f64>, &'static [&'static str]);

/// Rows choose what they use by their first element.
const USES_ALWAYS: f64 = 0.0;
const USES_SOMETIMES: f64 = 1.0;
const USES_ALL: f64 = 2.0;

const WIDTH: usize = 5;

/// Three branches, of which a batch uses only those that one of its rows asks for.
#[derive(Module)]
struct Branches {
    unit: Branching,
}

/// Fields in this order, so that the gradient that always comes is the first to leave.
#[derive(Module)]
struct Branching {
    name: String,
    rarely: Parameter,
    sometimes: Parameter,
    always: Parameter,
}

impl Branches {
    fn build() -> trainyard_nn::Result<Branches> {
        let builder = Builder::new(5).kind(Kind::Double);
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
        let wish = x.f_narrow(1, 0, 1)?;
        let mut y = x.f_matmul(&self.always.value()?)?;
        for (branch, least) in [(&self.sometimes, USES_SOMETIMES), (&self.rarely, USES_ALL)] {
            let wanting = wish.f_ge(least)?.f_to_kind(Kind::Double)?;
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

/// Two rows of a rank in a step; the first one wishes for a branch.
fn rows(rank: usize, step: usize, wish: f64) -> Tensor {
    let numbers = Tensor::arange(2 * WIDTH as i64, (Kind::Double, Device::Cpu));
    let x = (numbers * (1.3 + rank as f64 + 7.0 * step as f64))
        .sin()
        .view([2, WIDTH as i64]);
    let _ = x.narrow(1, 0, 1).fill_(0.0);
    let _ = x.get(0).get(0).fill_(wish);
    x
}

/// A bucket for every parameter, so that some leave while others are missing.
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
        Branches::build()?,
        &rank.world()?.everyone()?,
        options,
    )?)
}

fn backward(
    model: &Ddp<Branches>,
    x: &Tensor,
    sync: Sync,
) -> trainyard_parallel::Result<Vec<String>> {
    let run = model.forward(x, &Context::training(0))?;
    let loss = model.loss(
        run.output(),
        &Tensor::ones([2], (Kind::Double, Device::Cpu)),
    )?;
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

/// The gradients of all ranks' rows together, on one rank.
fn expected(batches: &[Tensor]) -> Result<Gradients, Box<dyn Error>> {
    let model = Branches::build()?;
    let x = Tensor::cat(batches, 0);
    let pass = run(&model, &x, &Context::training(0), &[])?;
    let targets = Tensor::ones(x.size()[0], (Kind::Double, Device::Cpu));
    let loss = model.loss(pass.output(), &targets)?;
    pass.backward(&loss)?;
    gradients(&model)
}

/// The same gradients, and none where there is to be none; the same bits on all ranks.
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
    let all = rank.everyone(&bits(&found))?;
    assert!(all.iter().all(|each| *each == all[0]), "ranks differ");
    Ok(())
}

/// What ranks wish for in a step, and so every rank's rows.
fn batches(rank: &Rank, step: usize, wish: impl Fn(usize) -> f64) -> Vec<Tensor> {
    (0..rank.size())
        .map(|index| rows(index, step, wish(index)))
        .collect()
}

/// One bucket, which then never leaves: no rank waits for another that has been refused.
pub fn named(rank: &Rank) -> Outcome {
    let model = wrap(rank, false, BucketLimits::default())?;
    let wish = if rank.index() == 0 {
        USES_SOMETIMES
    } else {
        USES_ALWAYS
    };
    let error = backward(&model, &rows(rank.index(), 0, wish), Sync::Reduce)
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

/// What a refused pass had begun must not be taken for what the next one does.
pub fn after_refusal(rank: &Rank) -> Outcome {
    let model = wrap(rank, false, SEPARATE)?;
    assert!(backward(&model, &rows(rank.index(), 0, USES_ALWAYS), Sync::Reduce).is_err());
    for step in 1..3 {
        model.zero_grad()?;
        let batches = batches(rank, step, |_| USES_ALL);
        backward(&model, &batches[rank.index()], Sync::Reduce)?;
        assert_equals_one_rank(rank, &model, &batches)?;
    }
    Ok(())
}

pub fn handled(rank: &Rank) -> Outcome {
    let model = wrap(rank, true, SEPARATE)?;
    for step in 0..3 {
        model.zero_grad()?;
        let batches = batches(rank, step, |_| USES_SOMETIMES);
        let unused = backward(&model, &batches[rank.index()], Sync::Reduce)?;
        assert_eq!(unused, ["rarely"]);
        assert_equals_one_rank(rank, &model, &batches)?;
    }
    Ok(())
}

/// In turn: used on one rank, on none, on all, on another rank; and in an accumulated pass only.
pub fn come_and_go(rank: &Rank) -> Outcome {
    let model = wrap(rank, true, SEPARATE)?;
    let last = rank.size() - 1;
    let only = move |chosen: usize, wish: f64| {
        move |index: usize| if index == chosen { wish } else { USES_ALWAYS }
    };
    let wishes: [Wish; 5] = [
        (Box::new(only(0, USES_SOMETIMES)), &["rarely"]),
        (Box::new(|_| USES_ALWAYS), &["rarely", "sometimes"]),
        (Box::new(|_| USES_ALL), &[]),
        (Box::new(only(last, USES_ALL)), &[]),
        (Box::new(only(last, USES_SOMETIMES)), &["rarely"]),
    ];
    for (step, (wish, unused)) in wishes.iter().enumerate() {
        model.zero_grad()?;
        let batches = batches(rank, step, wish);
        let mut found = backward(&model, &batches[rank.index()], Sync::Reduce)?;
        found.sort();
        assert_eq!(&found, unused, "step {step}");
        assert_equals_one_rank(rank, &model, &batches)?;
    }
    model.zero_grad()?;
    let mut all = batches(rank, 7, only(1, USES_ALL));
    backward(&model, &all[rank.index()], Sync::Accumulate)?;
    let second = batches(rank, 8, |_| USES_ALWAYS);
    assert_eq!(
        backward(&model, &second[rank.index()], Sync::Reduce)?,
        [""; 0]
    );
    all.extend(second);
    assert_equals_one_rank(rank, &model, &all)
}
