//! The report as JSON. A plan file can be read back.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use trainyard_arch::DecoderConfig;
use trainyard_schedule::ScheduleKind;

use super::Report;
use trainyard_plan::{
    Calibration, Cluster, Constants, Degrees, Memory, Offload, Overheads, PipelineLayout, Plan,
    PlanRequest, PrecisionByStage, Recompute, Software, SourcedValue, Strategy, StrategyError,
    Synchronization, Time,
};

/// Why a plan file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PlanFileError {
    /// Not the JSON of a report.
    #[error("not a plan file of `trainyard plan --json`: {0}")]
    Syntax(#[from] serde_json::Error),
    /// The file contains no plan.
    #[error("the file contains no plan: nothing fit in memory when it was written")]
    Empty,
    /// The requested plan does not exist.
    #[error("the file has no plan {number}: it contains plans 1 to {num_plans}")]
    Number {
        /// The requested number, from 1.
        number: usize,
        /// Number of plans in the file.
        num_plans: usize,
    },
    /// An unknown pipeline schedule.
    #[error("unknown schedule {0:?}")]
    Schedule(String),
    /// An invalid cluster.
    #[error(transparent)]
    Cluster(#[from] trainyard_plan::ClusterError),
    /// An invalid strategy.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
}

/// A plan that was read from a file, with its request.
#[derive(Clone, Debug)]
pub struct PlanFile {
    /// The request.
    pub request: PlanRequest,
    /// The plan, estimated again.
    pub plan: Plan,
}

#[derive(Deserialize, Serialize)]
struct Inputs {
    model: DecoderConfig,
    /// The cluster as the text of a cluster file.
    cluster: String,
    global_batch: usize,
    seq_len: usize,
    precision_by_stage: PrecisionByStage,
}

/// The settings of a strategy that are not part of the request.
#[derive(Deserialize, Serialize)]
struct StrategyJson {
    mesh: Degrees,
    zero_stage: usize,
    sequence_parallel: bool,
    schedule: String,
    stages_per_rank: usize,
    micro_batch: usize,
    recompute: Recompute,
    offload: Offload,
    synchronization: Synchronization,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    split_points: Vec<usize>,
}

#[derive(Deserialize)]
struct File {
    inputs: Inputs,
    plans: Vec<StrategyJson>,
}

impl PlanFile {
    /// Reads the best plan of a file and estimates it again.
    pub fn read(text: &str) -> Result<PlanFile, PlanFileError> {
        PlanFile::read_number(text, 1)
    }

    /// Reads plan `number` of a file, from 1, and estimates it again.
    pub fn read_number(text: &str, number: usize) -> Result<PlanFile, PlanFileError> {
        let File { inputs, plans } = serde_json::from_str(text)?;
        let num_plans = plans.len();
        if num_plans == 0 {
            return Err(PlanFileError::Empty);
        }
        let json = plans.into_iter().nth(number.wrapping_sub(1));
        let json = json.ok_or(PlanFileError::Number { number, num_plans })?;
        let cluster = Cluster::from_toml(&inputs.cluster)?;
        let request = PlanRequest {
            shape: inputs.model,
            calibration: Calibration::of_cluster(&cluster, Software::MODERN),
            cluster,
            overheads: Overheads::default(),
            global_batch: inputs.global_batch,
            seq_len: inputs.seq_len,
            precision: inputs.precision_by_stage,
            allow_fewer_nodes: false,
        };
        let strategy = json.strategy(&request)?;
        let plan = request.estimate(&strategy)?;
        Ok(PlanFile { request, plan })
    }
}

impl StrategyJson {
    fn of(strategy: &Strategy) -> StrategyJson {
        StrategyJson {
            mesh: strategy.degrees,
            zero_stage: strategy.zero_stage,
            sequence_parallel: strategy.sequence_parallel,
            schedule: strategy.pipeline.schedule.name().to_owned(),
            stages_per_rank: strategy.pipeline.stages_per_rank,
            micro_batch: strategy.micro_batch,
            recompute: strategy.recompute,
            offload: strategy.offload,
            synchronization: strategy.synchronization,
            split_points: strategy.split_points.clone(),
        }
    }

    fn strategy(self, request: &PlanRequest) -> Result<Strategy, PlanFileError> {
        let schedule: Result<ScheduleKind, _> = self.schedule.parse();
        let schedule = schedule.map_err(|_| PlanFileError::Schedule(self.schedule))?;
        Ok(Strategy {
            degrees: self.mesh,
            zero_stage: self.zero_stage,
            sequence_parallel: self.sequence_parallel,
            pipeline: PipelineLayout {
                schedule,
                stages_per_rank: self.stages_per_rank,
            },
            global_batch: request.global_batch,
            micro_batch: self.micro_batch,
            seq_len: request.seq_len,
            recompute: self.recompute,
            offload: self.offload,
            precision: request.precision.at(self.zero_stage),
            synchronization: self.synchronization,
            split_points: self.split_points,
        })
    }
}

impl Report {
    /// The best plans with their reasons, the request, and every input with its source.
    pub fn to_json(&self, most: usize) -> Value {
        let request = &self.request;
        let inputs = Inputs {
            model: request.shape.clone(),
            cluster: request.cluster.to_toml(),
            global_batch: request.global_batch,
            seq_len: request.seq_len,
            precision_by_stage: request.precision,
        };
        let plans = self.result.plans.iter().take(most).enumerate();
        let plans: Vec<Value> = plans
            .map(|(index, plan)| {
                let mut plan = self.plan_json(plan, self.why(index));
                plan["dry_run"] = self.dry_run_json(index);
                plan
            })
            .collect();
        let miss = match &self.explanation {
            Err(Some(miss)) => json!({
                "plan": self.plan_json(&miss.plan, self.sentences().join(" ")),
                "shortfall_bytes_per_rank": miss.shortfall,
            }),
            _ => Value::Null,
        };
        let compared = self.compared.as_ref().map(|compared| {
            let diff = &compared.diff;
            json!({
                "plan": self.plan_json(&diff.plan, String::new()),
                "position": compared.position,
                "slower_seconds": diff.slower_by,
                "terms": diff.terms.iter().map(|(name, s)| (*name, *s)).collect::<Named>().0,
                "shortfall_bytes_per_rank": compared.shortfall.max(0.0),
            })
        });
        let front = self.result.pareto_front.iter();
        json!({
            "plans": plans,
            "explanation": self.sentences(),
            "nearest_miss": miss,
            "compared": compared,
            "pareto_front": front.map(point).collect::<Vec<_>>(),
            "num_considered": self.result.num_considered,
            "num_out_of_memory": self.result.num_out_of_memory,
            "inputs": inputs,
            "hardware": self.hardware(),
            "slow_network": self.slow_network_json(),
            "overheads": {
                "context": sourced(&request.overheads.context),
                "fragmentation": sourced(&request.overheads.fragmentation),
            },
            "calibration": self.calibration(),
        })
    }

    /// A plan of any strategy with its estimates and the memory that it lacks, beside the recommended plan.
    pub fn checked_to_json(&self, plan: &Plan) -> Value {
        json!({
            "plan": self.plan_json(plan, String::new()),
            "shortfall_bytes_per_rank": self.request.shortfall(plan).max(0.0),
            "suggested": self.best().map(|best| self.plan_json(best, self.why(0))),
        })
    }

    fn plan_json(&self, plan: &Plan, why: String) -> Value {
        let Time {
            low, likely, high, ..
        } = plan.time;
        let terms = plan.time.terms().into_iter().collect::<Named>().0;
        let classes = self.request.memories(&plan.strategy);
        let strategy = json!(StrategyJson::of(&plan.strategy));
        let estimates = json!({
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
        merged(strategy, estimates)
    }

    fn hardware(&self) -> Value {
        let accelerator = &self.request.cluster.accelerator;
        json!({
            "name": accelerator.name,
            "num_nodes": self.request.cluster.num_nodes,
            "gpus_per_node": self.request.cluster.gpus_per_node,
            "sites": self.request.cluster.sites.as_ref().map(|sites| json!({
                "num_sites": sites.num_sites,
                "bytes_per_second": sourced(&sites.bandwidth),
                "round_trip_seconds": sourced(&sites.round_trip),
            })),
            "peak_flops": sourced(&accelerator.peak),
            "sustained_flops": sourced(&accelerator.sustained),
            "memory_bytes": sourced(&accelerator.memory),
            "memory_bytes_per_second": sourced(&accelerator.memory_bandwidth),
            "link_bytes_per_second": sourced(&accelerator.link),
            "link_per_peer_bytes_per_second": sourced(&accelerator.link_per_peer),
            "host_bytes_per_second": sourced(&accelerator.host),
            "network_bytes_per_second": sourced(&accelerator.network),
        })
    }

    fn calibration(&self) -> Value {
        let calibration = &self.request.calibration;
        let names = Constants::names().into_iter();
        let constants = names.zip(calibration.constants.to_array());
        json!({
            "source": calibration.source,
            "mean_error": calibration.mean_error,
            "spread": calibration.spread,
            "constants": constants.collect::<Named>().0,
        })
    }
}

/// An object with the entries of both.
pub(super) fn merged(mut object: Value, more: Value) -> Value {
    if let (Value::Object(all), Value::Object(more)) = (&mut object, more) {
        all.extend(more);
    }
    object
}

/// Numbers by name, in order.
pub(super) struct Named(pub(super) Map<String, Value>);

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

fn sourced(sourced: &SourcedValue) -> Value {
    json!({ "value": sourced.value, "basis": sourced.basis.to_string(), "source": sourced.source })
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
        "outer": memory.states.outer,
        "offloaded": memory.states.offloaded,
        "activations": memory.activations,
        "backward": memory.backward,
        "embedding": memory.embedding,
        "logits": memory.logits,
        "buffers": memory.buffers,
        "overhead": memory.overhead.total(),
        "context": memory.overhead.context,
        "communicators": memory.overhead.communicators,
        "workspaces": memory.overhead.workspaces,
        "fragmentation": memory.overhead.fragmentation,
        "moment": memory.moment.name(),
    })
}
