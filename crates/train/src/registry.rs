//! The components that a program adds to those of Trainyard: models, optimizers, datasets, losses, learning rate
//! schedules and metric sinks.
//!
//! A component has a name, by which the config chooses it, and keys of its own in `[custom.NAME]`, which reach it as a
//! type of the program. Everything else is as in any job: strategies, checkpoints, `verify`, dry runs, elasticity.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use tch::Tensor;
use trainyard_config::{Choice, Config, ConfigError, Dataset, ModelName, Names, OptimizerName};
use trainyard_data::Source;
use trainyard_nn::{Builder, Model, Parameter};
use trainyard_optim::Optimizer;
use trainyard_torch::World;

use crate::build::Phase;
use crate::error::{Result, TrainError};
use crate::metrics::MetricSink;

/// The type of a component without keys.
#[derive(Clone, Copy, Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoKeys {}

/// The loss of a model's output and the targets, summed over targets.
pub(crate) type LossFn = Rc<dyn Fn(&Tensor, &Tensor) -> trainyard_nn::Result<Tensor>>;

/// A learning rate, or a factor of one, by step.
pub(crate) type LrFn = Box<dyn Fn(u64) -> f64>;

type ModelFactory = dyn Fn(&Config, &Builder) -> Result<Box<dyn Model>>;
type OptimizerFactory = dyn Fn(&Config, Vec<Parameter>, &World) -> Result<Box<dyn Optimizer>>;
type DatasetFactory = dyn Fn(&Config, Phase) -> Result<Arc<dyn Source>>;
type LossFactory = dyn Fn(&Config) -> Result<LossFn>;
type ScheduleFactory = dyn Fn(&Config) -> Result<LrFn>;
type SinkFactory = dyn Fn(&Config) -> Result<Box<dyn MetricSink>>;
type KeysCheck = dyn Fn(&Config) -> Result<(), ConfigError>;

/// What a program registers.
#[derive(Default)]
pub struct Registry {
    models: BTreeMap<String, Box<ModelFactory>>,
    optimizers: BTreeMap<String, Box<OptimizerFactory>>,
    datasets: BTreeMap<String, Box<DatasetFactory>>,
    losses: BTreeMap<String, Box<LossFactory>>,
    lr_schedules: BTreeMap<String, Box<ScheduleFactory>>,
    metric_sinks: Vec<Box<SinkFactory>>,
    /// What reads the keys of each component.
    keys: BTreeMap<String, Box<KeysCheck>>,
    /// Names that two components have.
    repeated: Vec<String>,
}

impl Registry {
    /// The components of Trainyard only.
    pub fn builtin() -> Registry {
        Registry::default()
    }

    /// A model, for `model.name`. `build` creates its parameters with the builder, which knows the rank's device, types
    /// and groups.
    pub fn model<K: DeserializeOwned + 'static, M: Model + 'static>(
        mut self,
        name: &str,
        build: impl Fn(&Builder, &Config, K) -> trainyard_nn::Result<M> + 'static,
    ) -> Registry {
        let keys = self.keys_of(name);
        let build = move |config: &Config, builder: &Builder| -> Result<Box<dyn Model>> {
            Ok(Box::new(build(builder, config, keys(config)?)?))
        };
        self.models.insert(name.to_owned(), Box::new(build));
        self
    }

    /// An optimizer, for `optimizer.name`. Its parameters may be shards. Of the keys in `[optimizer]`, only `lr` has an
    /// effect of its own.
    pub fn optimizer<K: DeserializeOwned + 'static, O: Optimizer + 'static>(
        mut self,
        name: &str,
        build: impl Fn(Vec<Parameter>, &World, &Config, K) -> Result<O> + 'static,
    ) -> Registry {
        let keys = self.keys_of(name);
        let build = move |config: &Config, parameters, world: &World| {
            let optimizer: Box<dyn Optimizer> =
                Box::new(build(parameters, world, config, keys(config)?)?);
            Ok(optimizer)
        };
        self.optimizers.insert(name.to_owned(), Box::new(build));
        self
    }

    /// A dataset, for `training.dataset` and `validation.dataset`; the config has their paths.
    pub fn dataset<K: DeserializeOwned + 'static, S: Source + 'static>(
        mut self,
        name: &str,
        open: impl Fn(Phase, &Config, K) -> Result<S> + 'static,
    ) -> Registry {
        let keys = self.keys_of(name);
        let open = move |config: &Config, phase| {
            let source: Arc<dyn Source> = Arc::new(open(phase, config, keys(config)?)?);
            Ok(source)
        };
        self.datasets.insert(name.to_owned(), Box::new(open));
        self
    }

    /// A loss, for `training.loss`: of the model's output and the targets, summed over targets.
    pub fn loss<K: DeserializeOwned + 'static>(
        mut self,
        name: &str,
        loss: impl Fn(&Tensor, &Tensor, &K) -> trainyard_nn::Result<Tensor> + 'static,
    ) -> Registry {
        let (keys, loss) = (self.keys_of(name), Rc::new(loss));
        let build = move |config: &Config| {
            let (keys, loss) = (keys(config)?, Rc::clone(&loss));
            let loss: LossFn = Rc::new(move |output, targets| loss(output, targets, &keys));
            Ok(loss)
        };
        self.losses.insert(name.to_owned(), Box::new(build));
        self
    }

    /// A learning rate schedule, for `lr_scheduler.name`: the factor of `optimizer.lr` in a step, counted from 0, of
    /// a number of steps.
    pub fn lr_schedule<K: DeserializeOwned + 'static>(
        mut self,
        name: &str,
        factor: impl Fn(u64, u64, &K) -> f64 + 'static,
    ) -> Registry {
        let (keys, factor) = (self.keys_of(name), Rc::new(factor));
        let build = move |config: &Config| {
            let (keys, factor) = (keys(config)?, Rc::clone(&factor));
            let num_steps = config.training.steps;
            let of_step: LrFn = Box::new(move |step| factor(step, num_steps, &keys));
            Ok(of_step)
        };
        self.lr_schedules.insert(name.to_owned(), Box::new(build));
        self
    }

    /// A metric sink, which rank 0 opens in every job.
    pub fn metric_sink<S: MetricSink + 'static>(
        mut self,
        open: impl Fn(&Config) -> Result<S> + 'static,
    ) -> Registry {
        let open = move |config: &Config| {
            let sink: Box<dyn MetricSink> = Box::new(open(config)?);
            Ok(sink)
        };
        self.metric_sinks.push(Box::new(open));
        self
    }

    /// The names that a config may use beside those of Trainyard.
    pub fn names(&self) -> Names {
        let names = Names::builtin();
        let names = with_all(names, "model.name", self.models.keys());
        let names = with_all(names, "optimizer.name", self.optimizers.keys());
        with_all(names, "training.dataset", self.datasets.keys())
    }

    /// Rejects components that no config could choose, losses and schedules that are not registered, sections of no
    /// component, and keys that a component does not have. [`names`](Self::names) has the other components.
    pub(crate) fn check(&self, config: &Config) -> Result<()> {
        self.check_names()?;
        for section in config.custom.0.keys() {
            let Some(check) = self.keys.get(section) else {
                let found = format!("[custom.{section}]");
                return Err(unregistered(found, &self.keys));
            };
            check(config)?;
        }
        if let Some(name) = &config.training.loss {
            get(&self.losses, "training.loss", name)?;
        }
        if let Some(name) = &config.lr_scheduler.name {
            get(&self.lr_schedules, "lr_scheduler.name", name)?;
        }
        Ok(())
    }

    /// Names must be unique, because they also name the sections of keys, and none may be Trainyard's own.
    fn check_names(&self) -> Result<()> {
        let is_builtin_model = |name: &&String| Choice::<ModelName>::named(name).custom().is_none();
        let is_builtin_rule = |n: &&String| Choice::<OptimizerName>::named(n).custom().is_none();
        let is_builtin_data = |name: &&String| Choice::<Dataset>::named(name).custom().is_none();
        let mut taken = self.repeated.iter();
        let taken = taken
            .next()
            .or_else(|| self.models.keys().find(is_builtin_model))
            .or_else(|| self.optimizers.keys().find(is_builtin_rule))
            .or_else(|| self.datasets.keys().find(is_builtin_data));
        match taken {
            Some(name) => Err(TrainError::NameTaken { name: name.clone() }),
            None => Ok(()),
        }
    }

    pub(crate) fn build_model(
        &self,
        name: &str,
        config: &Config,
        builder: &Builder,
    ) -> Result<Box<dyn Model>> {
        get(&self.models, "model.name", name)?(config, builder)
    }

    pub(crate) fn build_optimizer(
        &self,
        name: &str,
        config: &Config,
        parameters: Vec<Parameter>,
        world: &World,
    ) -> Result<Box<dyn Optimizer>> {
        get(&self.optimizers, "optimizer.name", name)?(config, parameters, world)
    }

    pub(crate) fn open_dataset(
        &self,
        name: &str,
        config: &Config,
        phase: Phase,
    ) -> Result<Arc<dyn Source>> {
        get(&self.datasets, "training.dataset", name)?(config, phase)
    }

    /// The loss of `training.loss`; none if the model's own is used.
    pub(crate) fn build_loss(&self, config: &Config) -> Result<Option<LossFn>> {
        let build = |name: &String| get(&self.losses, "training.loss", name)?(config);
        config.training.loss.as_ref().map(build).transpose()
    }

    /// The factor of every step by `lr_scheduler.name`; none without a registered schedule.
    pub(crate) fn lr_factor(&self, config: &Config) -> Result<Option<LrFn>> {
        let build = |name: &String| get(&self.lr_schedules, "lr_scheduler.name", name)?(config);
        config.lr_scheduler.name.as_ref().map(build).transpose()
    }

    pub(crate) fn open_sinks(&self, config: &Config) -> Result<Vec<Box<dyn MetricSink>>> {
        self.metric_sinks.iter().map(|open| open(config)).collect()
    }

    /// Reads the keys of a component, and lets [`check`](Self::check) do so before the job starts.
    fn keys_of<K: DeserializeOwned + 'static>(
        &mut self,
        name: &str,
    ) -> impl Fn(&Config) -> Result<K, ConfigError> + use<K> {
        let section = name.to_owned();
        let read = move |config: &Config| config.custom_section::<K>(&section);
        let check = read.clone();
        let check = move |config: &Config| check(config).map(drop);
        if self.keys.insert(name.to_owned(), Box::new(check)).is_some() {
            self.repeated.push(name.to_owned());
        }
        read
    }
}

fn get<'a, T: ?Sized>(
    components: &'a BTreeMap<String, Box<T>>,
    key: &str,
    name: &str,
) -> Result<&'a T> {
    let component = components.get(name).map(|factory| &**factory);
    component.ok_or_else(|| unregistered(format!("{key} = {name:?}"), components))
}

fn unregistered<T>(found: String, components: &BTreeMap<String, T>) -> TrainError {
    TrainError::Unregistered {
        found,
        registered: components.keys().cloned().collect(),
    }
}

fn with_all<'a>(
    names: Names,
    key: &'static str,
    registered: impl Iterator<Item = &'a String>,
) -> Names {
    registered.fold(names, |names, name| names.with(key, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_schedule(registry: Registry, name: &str) -> Registry {
        registry.lr_schedule(name, |_, _, _: &NoKeys| 1.0)
    }

    #[test]
    fn names_are_unique() {
        let config = Config::default();
        let one = with_schedule(Registry::builtin(), "flat");
        one.check(&config).unwrap();
        let error = with_schedule(one, "flat").check(&config).unwrap_err();
        assert!(matches!(error, TrainError::NameTaken { name } if name == "flat"));

        let build = |_: &Builder, _: &Config, _: NoKeys| -> trainyard_nn::Result<Rc<dyn Model>> {
            Err(trainyard_nn::NnError::RepeatedUnit {
                unit: String::new(),
            })
        };
        let error = Registry::builtin().model("gpt2", build).check(&config);
        assert!(matches!(error, Err(TrainError::NameTaken { name }) if name == "gpt2"));
    }

    #[test]
    fn a_schedule_is_chosen_by_name() {
        let mut config = Config::default();
        config.lr_scheduler.name = Some("half".to_owned());
        config.training.steps = 8;
        let registry = Registry::builtin().lr_schedule("half", |step, num_steps, _: &NoKeys| {
            step as f64 / num_steps as f64
        });
        registry.check(&config).unwrap();
        let factor = registry.lr_factor(&config).unwrap().unwrap();
        assert_eq!(factor(4), 0.5);
        Registry::builtin().check(&config).unwrap_err();
    }
}
