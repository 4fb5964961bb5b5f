//! A plain `tch` model adapted to units.

use std::{cell::RefCell, rc::Rc};

use tch::{
    Device, Kind, Tensor,
    nn::{self, Module as _},
};
use trainyard_nn::{
    Context, LossFn, Model, Module, Result, UnitCall, UnitFn, UnitHooks, VarStoreModel,
    cross_entropy_sum, run,
};

fn layer(path: nn::Path<'_>, inputs: i64, outputs: i64) -> UnitFn {
    let linear = nn::linear(path, inputs, outputs, Default::default());
    Box::new(move |x, _| linear.forward(x))
}

fn loss() -> LossFn {
    Box::new(|output, targets| {
        cross_entropy_sum(output, targets).expect("valid logits and classes")
    })
}

#[test]
fn variables_keep_their_names_and_train_in_place() -> Result<()> {
    let vs = nn::VarStore::new(Device::Cpu);
    let units = vec![
        ("net.1", layer(vs.root() / "net" / "1", 4, 8)),
        ("net.10", layer(vs.root() / "net" / "10", 8, 3)),
    ];
    let model = VarStoreModel::new(&vs, units, loss())?;

    let names: Vec<_> = model
        .parameters()
        .iter()
        .map(|p| p.name().to_owned())
        .collect();
    assert_eq!(
        names,
        ["net.1.bias", "net.1.weight", "net.10.bias", "net.10.weight"]
    );
    let unit_sizes: Vec<_> = model
        .units()
        .iter()
        .map(|unit| unit.num_parameters())
        .collect();
    assert_eq!(unit_sizes, [4 * 8 + 8, 8 * 3 + 3]);

    #[derive(Default)]
    struct Finished(RefCell<Vec<String>>);
    impl UnitHooks for Finished {
        fn after_backward(&self, call: &UnitCall) -> Result<()> {
            self.0.borrow_mut().push(call.name.to_string());
            Ok(())
        }
    }
    let finished = Rc::new(Finished::default());
    let x = Tensor::randn([5, 4], (Kind::Float, Device::Cpu));
    let targets = Tensor::from_slice(&[0i64, 1, 2, 1, 0]);
    let hooks: [Rc<dyn UnitHooks>; 1] = [finished.clone()];
    let pass = run(&model, &x, &Context::training(0), &hooks)?;
    let loss = model.loss(pass.output(), &targets)?;
    pass.backward(&loss)?;
    assert_eq!(*finished.0.borrow(), ["net.10", "net.1"]);
    assert!(
        vs.variables()
            .values()
            .all(|variable| variable.grad().defined())
    );
    Ok(())
}

#[test]
fn the_error_names_a_variable_without_a_unit() {
    let vs = nn::VarStore::new(Device::Cpu);
    let units = vec![("body", layer(vs.root() / "body", 4, 8))];
    let _head = layer(vs.root() / "head", 8, 3);
    let error = VarStoreModel::new(&vs, units, loss())
        .err()
        .expect("refused");
    let message = error.to_string();
    assert!(
        message.starts_with("no unit owns head.bias, head.weight"),
        "{message}"
    );
    assert!(message.contains("(units: body)"), "{message}");
}

#[test]
fn buffers_are_visited_but_not_trained() -> Result<()> {
    let vs = nn::VarStore::new(Device::Cpu);
    let norm = nn::batch_norm1d(vs.root() / "norm", 4, Default::default());
    let units: Vec<(&str, UnitFn)> = vec![(
        "norm",
        Box::new(move |x, cx| nn::ModuleT::forward_t(&norm, x, cx.training)),
    )];
    let model = VarStoreModel::new(&vs, units, loss())?;
    let trained: Vec<_> = model
        .parameters()
        .iter()
        .filter(|p| p.is_trainable())
        .map(|p| p.name().to_owned())
        .collect();
    assert_eq!(trained, ["norm.bias", "norm.weight"]);
    assert_eq!(model.parameters().len(), 4);
    Ok(())
}
