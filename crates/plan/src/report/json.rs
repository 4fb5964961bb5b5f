//! The same for programs; a plan that was written can be read again.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use trainyard_schedule::Kind;

use super::Report;
use crate::{
    Calibration, Cluster, Constants, Degrees, Figure, Held, Layers, Memory, Offload, Overheads,
    Plan, Question, Recompute, Shape, Software, Strategy, StrategyError, Time,
};

/// Why a plan cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PlanFileError {
    /// Other JSON, or none.
    #[error("not a plan as `trainyard plan --json` writes it: {0}")]
    Syntax(#[from] serde_json::Error),
    /// Nothing fitted, so there is no plan in it.
    #[error("the file has no plan: nothing fitted when it was written")]
    Empty,
    /// No such plan in it.
    #[error("the file has {num_plans} plans and no plan {place}: count from 1")]
    Place {
        /// Which was asked for.
        place: usize,
        /// How many there are.
        num_plans: usize,
    },
    /// A schedule that nobody knows.
    #[error("the schedule {0:?} is not known")]
    Schedule(String),
    /// Its cluster, refused.
    #[error(transparent)]
    Cluster(#[from] crate::ClusterError),
    /// Its strategy, refused.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
}

/// A plan that was written, with what it was for.
#[derive(Clone, Debug)]
pub struct PlanFile {
    /// What was asked.
    pub question: Question,
    /// One of its plans.
    pub plan: Plan,
}

#[derive(Deserialize, Serialize)]
struct Inputs {
    model: Shape,
    /// As a cluster file, from which everything about it follows.
    cluster: String,
    global_batch: usize,
    seq_len: usize,
    held: Held,
}

/// A strategy's choices beside what was asked.
#[derive(Deserialize, Serialize)]
struct Choices {
    mesh: Degrees,
    zero_stage: usize,
    sequence_parallel: bool,
    schedule: String,
    stages_per_rank: usize,
    micro_batch: usize,
    recompute: Recompute,
    offload: Offload,
}

#[derive(Deserialize)]
struct File {
    inputs: Inputs,
    plans: Vec<Choices>,
}

impl PlanFile {
    /// Reads the best plan and prices it again.
    pub fn read(text: &str) -> Result<PlanFile, PlanFileError> {
        PlanFile::read_place(text, 1)
    }

    /// The same for the plan at a place, from 1.
    pub fn read_place(text: &str, place: usize) -> Result<PlanFile, PlanFileError> {
        let File { inputs, plans } = serde_json::from_str(text)?;
        let num_plans = plans.len();
        if num_plans == 0 {
            return Err(PlanFileError::Empty);
        }
        let choices = plans.into_iter().nth(place.wrapping_sub(1));
        let choices = choices.ok_or(PlanFileError::Place { place, num_plans })?;
        let cluster = Cluster::from_toml(&inputs.cluster)?;
        let question = Question {
            shape: inputs.model,
            calibration: Calibration::of_cluster(&cluster, Software::MODERN),
            cluster,
            overheads: Overheads::default(),
            global_batch: inputs.global_batch,
            seq_len: inputs.seq_len,
            held: inputs.held,
            fewer_machines: false,
        };
        let strategy = choices.strategy(&question)?;
        let plan = question.price(&strategy)?;
        Ok(PlanFile { question, plan })
    }
}

impl Choices {
    fn of(strategy: &Strategy) -> Choices {
        Choices {
            mesh: strategy.degrees,
            zero_stage: strategy.zero_stage,
            sequence_parallel: strategy.sequence_parallel,
            schedule: strategy.layers.schedule.name().to_owned(),
            stages_per_rank: strategy.layers.stages_per_rank,
            micro_batch: strategy.micro_batch,
            recompute: strategy.recompute,
            offload: strategy.offload,
        }
    }

    fn strategy(self, question: &Question) -> Result<Strategy, PlanFileError> {
        let schedule: Result<Kind, _> = self.schedule.parse();
        let schedule = schedule.map_err(|_| PlanFileError::Schedule(self.schedule))?;
        Ok(Strategy {
            degrees: self.mesh,
            zero_stage: self.zero_stage,
            sequence_parallel: self.sequence_parallel,
            layers: Layers {
                schedule,
                stages_per_rank: self.stages_per_rank,
            },
            global_batch: question.global_batch,
            micro_batch: self.micro_batch,
            seq_len: question.seq_len,
            recompute: self.recompute,
            offload: self.offload,
            precision: question.held.at(self.zero_stage),
        })
    }
}

impl Report {
    /// The first plans with their reasons, what was asked, and every figure with its basis.
    pub fn to_json(&self, most: usize) -> Value {
        let question = &self.question;
        let inputs = Inputs {
            model: question.shape.clone(),
            cluster: question.cluster.to_toml(),
            global_batch: question.global_batch,
            seq_len: question.seq_len,
            held: question.held,
        };
        let plans = self.found.plans.iter().take(most).enumerate();
        let plans: Vec<Value> = plans
            .map(|(place, plan)| {
                let mut plan = self.plan_json(plan, self.why(place));
                plan["dry_run"] = self.dry_run_json(place);
                plan
            })
            .collect();
        let miss = match &self.why {
            Err(Some(miss)) => json!({
                "plan": self.plan_json(&miss.plan, self.sentences().join(" ")),
                "missing_bytes_per_rank": miss.missing,
            }),
            _ => Value::Null,
        };
        let compared = self.compared.as_ref().map(|compared| {
            let lost = &compared.lost;
            json!({
                "plan": self.plan_json(&lost.plan, String::new()),
                "place": compared.place,
                "slower_seconds": lost.slower,
                "terms": lost.terms.iter().map(|(name, s)| (*name, *s)).collect::<Named>().0,
                "missing_bytes_per_rank": compared.missing.max(0.0),
            })
        });
        let front = self.found.front.iter();
        json!({
            "plans": plans,
            "explanation": self.sentences(),
            "nearest_miss": miss,
            "compared": compared,
            "front": front.map(point).collect::<Vec<_>>(),
            "num_considered": self.found.num_considered,
            "num_too_large": self.found.num_too_large,
            "inputs": inputs,
            "hardware": self.hardware(),
            "overheads": {
                "context": figure(&question.overheads.context),
                "fragmentation": figure(&question.overheads.fragmentation),
            },
            "calibration": self.calibration(),
        })
    }

    fn plan_json(&self, plan: &Plan, why: String) -> Value {
        let Time {
            low, likely, high, ..
        } = plan.time;
        let terms = plan.time.terms().into_iter().collect::<Named>().0;
        let classes = self.question.memories(&plan.strategy);
        let mut value = json!(Choices::of(&plan.strategy));
        let figures = json!({
            "num_microbatches": plan.strategy.num_microbatches(),
            "step_seconds": likely,
            "step_seconds_range": [low, high],
            "step_seconds_terms": terms,
            "peak_bytes": plan.memory.total(),
            "memory": classes.iter().map(memory).collect::<Vec<_>>(),
            "mfu": self.utilization(plan),
            "tokens_per_second_per_gpu": self.tokens_per_second(plan),
            "why": why,
        });
        if let (Value::Object(all), Value::Object(figures)) = (&mut value, figures) {
            all.extend(figures);
        }
        value
    }

    fn hardware(&self) -> Value {
        let accelerator = &self.question.cluster.accelerator;
        json!({
            "name": accelerator.name,
            "num_machines": self.question.cluster.num_machines,
            "per_machine": self.question.cluster.per_machine,
            "peak_flops": figure(&accelerator.peak),
            "sustained_flops": figure(&accelerator.sustained),
            "memory_bytes": figure(&accelerator.memory),
            "memory_bytes_per_second": figure(&accelerator.memory_bandwidth),
            "link_bytes_per_second": figure(&accelerator.link),
            "link_per_peer_bytes_per_second": figure(&accelerator.link_per_peer),
            "host_bytes_per_second": figure(&accelerator.host),
            "network_bytes_per_second": figure(&accelerator.network),
        })
    }

    fn calibration(&self) -> Value {
        let calibration = &self.question.calibration;
        let names = Constants::names().into_iter();
        let constants = names.zip(calibration.constants.to_array());
        json!({
            "source": calibration.source,
            "mean_error": calibration.spread,
            "constants": constants.collect::<Named>().0,
        })
    }
}

/// Numbers by name, in the order they came.
struct Named(Map<String, Value>);

impl<'a> FromIterator<(&'a str, f64)> for Named {
    fn from_iter<I: IntoIterator<Item = (&'a str, f64)>>(pairs: I) -> Named {
        let pairs = pairs.into_iter();
        Named(
            pairs
                .map(|(key, value)| (key.to_owned(), json!(value)))
                .collect(),
        )
    }
}

fn figure(figure: &Figure) -> Value {
    json!({ "value": figure.value, "basis": figure.basis.to_string(), "source": figure.source })
}

fn point(plan: &Plan) -> Value {
    json!({
        "mesh": plan.strategy.degrees,
        "zero_stage": plan.strategy.zero_stage,
        "recompute": plan.strategy.recompute,
        "step_seconds": plan.time.likely,
        "peak_bytes": plan.memory.total(),
    })
}

fn memory(memory: &Memory) -> Value {
    json!({
        "class": memory.class.name(),
        "total": memory.total(),
        "parameters": memory.states.parameters,
        "gradients": memory.states.gradients,
        "optimizer": memory.states.optimizer,
        "gathered": memory.states.gathered,
        "offloaded": memory.states.offloaded,
        "activations": memory.activations,
        "computed_again": memory.computed_again,
        "embedding": memory.embedding,
        "logits": memory.logits,
        "buffers": memory.buffers,
        "overhead": memory.overhead,
    })
}
