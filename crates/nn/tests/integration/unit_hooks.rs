//! The order in which hooks are called around units.

use std::{cell::RefCell, rc::Rc};

use tch::{Device, Kind, Tensor};
use trainyard_nn::{
    Builder, Context, Init, Model, Module, NnError, Result, ThreadBound, Unit, UnitCall, UnitHooks,
    layers::Linear, run,
};
use trainyard_torch::{TorchError, autograd};

#[derive(Module)]
struct Layer {
    name: String,
    linear: Linear,
}

impl Unit for Layer {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward(&self, x: &Tensor, _: &Context) -> Result<Tensor> {
        // Two paths from the input to the output, as in a residual block.
        Ok(self.linear.forward(&x.tanh())? + x)
    }
}

#[derive(Module)]
struct Chain {
    layers: Vec<Layer>,
}

impl Chain {
    fn new(names: &[&str]) -> Result<Chain> {
        let builder = Builder::new(1).kind(Kind::Double);
        let layer = |name: &&str| {
            Ok(Layer {
                name: name.to_string(),
                linear: Linear::with_bias(&builder.push(name), 4, 4, Init::fan_in(4))?,
            })
        };
        let layers = names.iter().map(layer).collect::<Result<_>>()?;
        Ok(Chain { layers })
    }

    fn gradients(&self) -> Vec<Tensor> {
        let parameters = self.parameters();
        parameters.iter().map(|p| p.tensor().grad()).collect()
    }

    fn clear(&self) -> Result<()> {
        for parameter in self.parameters() {
            autograd::clear_grad(parameter.tensor())?;
        }
        Ok(())
    }
}

impl Model for Chain {
    fn units(&self) -> Vec<&dyn Unit> {
        self.layers.iter().map(|layer| layer as &dyn Unit).collect()
    }

    fn loss(&self, output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        Ok((output - targets).square().sum(Kind::Double))
    }
}

fn data() -> (Tensor, Tensor) {
    let x = Tensor::arange(12, (Kind::Double, Device::Cpu)).view([3, 4]) / 12.0;
    let targets = x.cos();
    (x, targets)
}

/// Forward and backward with `hooks`.
fn step(model: &Chain, hooks: &[Rc<dyn UnitHooks>]) -> Result<()> {
    let (x, targets) = data();
    let pass = run(model, &x, &Context::training(0), hooks)?;
    let loss = model.loss(pass.output(), &targets)?;
    pass.backward(&loss)
}

type Log = Rc<RefCell<Vec<String>>>;

/// Logs events, and checks which parameters have gradients at each.
struct EventLog {
    name: &'static str,
    log: Log,
    parameters: Vec<Vec<trainyard_nn::Parameter>>,
}

impl EventLog {
    fn of(name: &'static str, model: &Chain, log: &Log) -> Rc<dyn UnitHooks> {
        Rc::new(EventLog {
            name,
            log: log.clone(),
            parameters: model.units().iter().map(|unit| unit.parameters()).collect(),
        })
    }

    fn record(&self, what: &str, call: &UnitCall) -> Result<()> {
        let entry = format!("{}{what} {}", self.name, call.name);
        self.log.borrow_mut().push(entry);
        Ok(())
    }

    fn num_gradients(&self, index: usize) -> usize {
        let has_gradient = |p: &&trainyard_nn::Parameter| p.tensor().grad().defined();
        self.parameters[index].iter().filter(has_gradient).count()
    }
}

impl UnitHooks for EventLog {
    fn before_forward(&self, call: &UnitCall) -> Result<()> {
        self.record(">f", call)
    }

    fn after_forward(&self, call: &UnitCall) -> Result<()> {
        self.record("<f", call)
    }

    fn before_backward(&self, call: &UnitCall) -> Result<()> {
        assert_eq!(self.num_gradients(call.index), 0, "{call:?}");
        self.record(">b", call)
    }

    fn after_backward(&self, call: &UnitCall) -> Result<()> {
        assert_eq!(self.num_gradients(call.index), 2, "{call:?}");
        self.record("<b", call)
    }
}

#[test]
fn events_are_in_order_and_the_first_unit_finishes_backward() -> Result<()> {
    let model = Chain::new(&["a", "b", "c"])?;
    let log = Log::default();
    step(&model, &[EventLog::of("", &model, &log)])?;
    assert_eq!(
        *log.borrow(),
        [
            ">f a", "<f a", ">f b", "<f b", ">f c", "<f c", //
            ">b c", "<b c", ">b b", "<b b", ">b a", "<b a",
        ]
    );
    Ok(())
}

#[test]
fn the_first_hooks_are_outermost() -> Result<()> {
    let model = Chain::new(&["a"])?;
    let log = Log::default();
    let (outer, inner) = (
        EventLog::of("1", &model, &log),
        EventLog::of("2", &model, &log),
    );
    step(&model, &[outer, inner])?;
    assert_eq!(
        *log.borrow(),
        [
            "1>f a", "2>f a", "2<f a", "1<f a", "1>b a", "2>b a", "2<b a", "1<b a"
        ]
    );
    Ok(())
}

#[test]
fn an_input_that_requires_a_gradient_gets_one() -> Result<()> {
    let model = Chain::new(&["a", "b"])?;
    let log = Log::default();
    let (x, targets) = data();
    let x = x.set_requires_grad(true);
    let pass = run(
        &model,
        &x,
        &Context::training(0),
        &[EventLog::of("", &model, &log)],
    )?;
    let loss = model.loss(pass.output(), &targets)?;
    pass.backward(&loss)?;
    assert!(x.grad().defined());
    assert_eq!(log.borrow()[4..], [">b b", "<b b", ">b a", "<b a"]);
    Ok(())
}

#[test]
fn hooks_do_not_change_gradients() -> Result<()> {
    let model = Chain::new(&["a", "b", "c"])?;
    step(&model, &[])?;
    let plain: Vec<Tensor> = model.gradients().iter().map(Tensor::copy).collect();
    model.clear()?;
    step(&model, &[EventLog::of("", &model, &Log::default())])?;
    for (plain, watched) in plain.iter().zip(model.gradients()) {
        assert!(plain.equal(&watched));
    }
    Ok(())
}

#[test]
fn concurrent_runs_are_distinguished() -> Result<()> {
    let model = Chain::new(&["a", "b"])?;
    struct Runs(RefCell<Vec<u64>>);
    impl UnitHooks for Runs {
        fn after_backward(&self, call: &UnitCall) -> Result<()> {
            self.0.borrow_mut().push(call.run);
            Ok(())
        }
    }
    let runs = Rc::new(Runs(RefCell::default()));
    let (x, targets) = data();
    let watching: [Rc<dyn UnitHooks>; 1] = [runs.clone()];
    let forward = || run(&model, &x, &Context::training(0), &watching);
    let (one, two) = (forward()?, forward()?);
    for pass in [two, one] {
        let loss = model.loss(pass.output(), &targets)?;
        pass.backward(&loss)?;
    }
    let heard = runs.0.borrow();
    assert_eq!(heard[0], heard[1]);
    assert_eq!(heard[2], heard[3]);
    assert!(heard[0] > heard[2]);
    Ok(())
}

#[test]
fn an_evaluation_has_no_backward_events() -> Result<()> {
    let model = Chain::new(&["a"])?;
    let log = Log::default();
    let diary = EventLog::of("", &model, &log);
    let output = tch::no_grad(|| run(&model, &data().0, &Context::evaluation(0), &[diary]))?;
    assert!(!output.output().requires_grad());
    assert_eq!(*log.borrow(), [">f a", "<f a"]);
    Ok(())
}

/// Hooks that fail at one unit.
struct Failing {
    before: Option<&'static str>,
    after: Option<&'static str>,
}

impl Failing {
    fn check(unit: Option<&str>, call: &UnitCall) -> Result<()> {
        if unit == Some(&*call.name) {
            Err(NnError::strategy(std::io::Error::other("hook failure")))
        } else {
            Ok(())
        }
    }
}

impl UnitHooks for Failing {
    fn before_backward(&self, call: &UnitCall) -> Result<()> {
        Failing::check(self.before, call)
    }

    fn after_backward(&self, call: &UnitCall) -> Result<()> {
        Failing::check(self.after, call)
    }
}

#[test]
fn an_error_in_a_hook_reaches_the_caller_of_backward_unchanged() -> Result<()> {
    let model = Chain::new(&["a", "b", "c"])?;
    for unit in ["a", "b", "c"] {
        for (before, after) in [(Some(unit), None), (None, Some(unit))] {
            let moment = if before.is_some() {
                "before_backward"
            } else {
                "after_backward"
            };
            let error = step(&model, &[Rc::new(Failing { before, after })]).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("{moment} hook of unit {unit} failed: hook failure")
            );
            let NnError::Hook { source, .. } = error else {
                panic!("unexpected error: {error}");
            };
            assert!(matches!(*source, NnError::Strategy(_)));
        }
    }
    Ok(())
}

#[test]
fn backward_without_the_run_is_rejected() -> Result<()> {
    let model = Chain::new(&["a", "b"])?;
    let (x, targets) = data();
    let diary = [EventLog::of("", &model, &Log::default())];
    let pass = run(&model, &x, &Context::training(0), &diary)?;
    let loss = model.loss(pass.output(), &targets)?;
    let message = loss.f_backward().unwrap_err().to_string();
    assert!(message.contains("Run::backward"), "{message}");

    let pass = run(&model, &x, &Context::training(0), &diary)?;
    let loss = model.loss(&pass.into_output(), &targets)?;
    let message = loss.f_backward().unwrap_err().to_string();
    assert!(message.contains("Run::backward"), "{message}");
    Ok(())
}

/// Saves only the input of a unit, and runs it again in backward.
struct Recompute {
    model: Rc<Chain>,
    num_forwards: Rc<RefCell<usize>>,
}

impl UnitHooks for Recompute {
    fn wrap(
        &self,
        call: &UnitCall,
        x: &Tensor,
        forward: &dyn Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let carried = |error: NnError| TorchError::Other(error.to_string());
        let again = {
            let (model, call, count) =
                (self.model.clone(), call.clone(), self.num_forwards.clone());
            ThreadBound::new(move |x: &Tensor| {
                *count.borrow_mut() += 1;
                model.units()[call.index].forward(x, &call.context)
            })
        };
        // The parameter makes the output require a gradient even if the input does not.
        let anchor = self.model.units()[call.index].parameters()[0].clone();
        let outputs = autograd::apply_multi_output(
            &[x, anchor.tensor()],
            |saver, inputs| {
                saver.save(inputs[0]);
                Ok(vec![forward(inputs[0]).map_err(carried)?])
            },
            move |saved, gradients| {
                let x = saved[0].detach().set_requires_grad(true);
                let again = again.get().map_err(carried)?;
                let gradient = gradients[0].as_ref().map(Tensor::shallow_clone);
                let gradient = gradient.unwrap_or_else(|| Tensor::from(0.0));
                let pulled = tch::with_grad(|| Ok((again(&x)? * gradient).sum(Kind::Double)));
                pulled.map_err(carried)?.f_backward()?;
                Ok(vec![Some(x.grad()), None])
            },
        )?;
        Ok(outputs.into_iter().next().expect("one output"))
    }
}

#[test]
fn a_unit_can_be_run_again_in_backward() -> Result<()> {
    let model = Rc::new(Chain::new(&["a", "b", "c"])?);
    step(&model, &[])?;
    let plain: Vec<Tensor> = model.gradients().iter().map(Tensor::copy).collect();
    model.clear()?;

    let num_forwards = Rc::new(RefCell::new(0));
    let recompute = Rc::new(Recompute {
        model: model.clone(),
        num_forwards: num_forwards.clone(),
    });
    let log = Log::default();
    step(&model, &[EventLog::of("", &model, &log), recompute])?;
    assert_eq!(*num_forwards.borrow(), 3);
    assert_eq!(
        log.borrow()[6..],
        [">b c", "<b c", ">b b", "<b b", ">b a", "<b a"]
    );
    for (plain, recompute) in plain.iter().zip(model.gradients()) {
        assert!(plain.allclose(&recompute, 1e-14, 1e-14, false));
    }
    Ok(())
}
