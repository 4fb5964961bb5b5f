//! Simulation of a schedule under given costs.

use crate::{Action, ComputeType, Schedule, ScheduleError, Task};

/// The durations of computations and transfers, in any unit.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// One entry per stage; a single entry applies to all stages.
    stages: Vec<StageCost>,
    /// Duration of a transfer between stages on different ranks, which overlaps computation.
    pub transfer: f64,
    /// Duration of an overlapped forward and backward, relative to running them one after the other.
    pub overlap: f64,
}

/// The durations of one stage.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub(crate) struct StageCost {
    pub forward: f64,
    pub backward: f64,
    pub backward_input: f64,
    pub backward_weight: f64,
}

impl StageCost {
    /// A full backward takes as long as its two parts.
    const fn new(forward: f64, backward_input: f64, backward_weight: f64) -> StageCost {
        StageCost {
            forward,
            backward: backward_input + backward_weight,
            backward_input,
            backward_weight,
        }
    }
}

impl Costs {
    /// Equal costs for every stage; a full backward takes as long as its two parts.
    pub fn uniform(forward: f64, backward_input: f64, backward_weight: f64) -> Costs {
        Costs::new(vec![StageCost::new(
            forward,
            backward_input,
            backward_weight,
        )])
    }

    /// `(forward, backward for input, backward for weight)` of each stage.
    pub fn per_stage(stages: &[(f64, f64, f64)]) -> Costs {
        let stages = stages.iter();
        Costs::new(stages.map(|&(f, i, w)| StageCost::new(f, i, w)).collect())
    }

    pub(crate) fn new(stages: Vec<StageCost>) -> Costs {
        Costs {
            stages,
            transfer: 0.0,
            overlap: 1.0,
        }
    }

    pub(crate) fn of(&self, task: Task) -> f64 {
        let index = task.stage.min(self.stages.len().saturating_sub(1));
        let Some(cost) = self.stages.get(index) else {
            return 0.0;
        };
        match task.compute_type {
            ComputeType::Forward => cost.forward,
            ComputeType::BackwardInput => cost.backward_input,
            ComputeType::BackwardWeight => cost.backward_weight,
            ComputeType::Backward => cost.backward,
        }
    }

    fn of_action(&self, action: &Action) -> f64 {
        let alone: f64 = action.tasks().map(|task| self.of(task)).sum();
        match action {
            Action::Single(_) => alone,
            Action::Overlapped(..) => alone * self.overlap,
        }
    }
}

/// An action with its start and end time.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Span {
    /// The action.
    pub action: Action,
    /// Start time.
    pub start: f64,
    /// End time.
    pub end: f64,
}

/// The timed actions of every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// The spans of each rank, in order.
    pub ranks: Vec<Vec<Span>>,
}

impl Timeline {
    /// The time at which the last rank finishes.
    pub fn end(&self) -> f64 {
        let ends = self.ranks.iter().filter_map(|spans| spans.last());
        ends.map(|span| span.end).fold(0.0, f64::max)
    }

    /// Total duration of the actions of `rank`.
    pub fn busy_time(&self, rank: usize) -> f64 {
        self.ranks[rank].iter().map(|s| s.end - s.start).sum()
    }

    /// Time that `rank` is idle between its first action and its last.
    pub fn idle_time(&self, rank: usize) -> f64 {
        match &self.ranks[rank][..] {
            [first, .., last] => last.end - first.start - self.busy_time(rank),
            _ => 0.0,
        }
    }

    /// The pipeline bubble: the idle time of the rank that idles most. Time before a rank's first action and after
    /// its last is not counted, since the adjacent steps use it.
    pub fn bubble(&self) -> f64 {
        let ranks = 0..self.ranks.len();
        ranks.map(|rank| self.idle_time(rank)).fold(0.0, f64::max)
    }

    /// The maximum number of in-flight micro-batches of each rank, counted per stage.
    pub fn max_in_flight(&self) -> Vec<usize> {
        self.ranks
            .iter()
            .map(|spans| peak_in_flight(spans))
            .collect()
    }
}

fn peak_in_flight(spans: &[Span]) -> usize {
    let (mut in_flight, mut peak) = (0usize, 0);
    for task in spans.iter().flat_map(|span| span.action.tasks()) {
        match task.compute_type {
            ComputeType::Forward => {
                in_flight += 1;
                peak = peak.max(in_flight);
            }
            kind if kind.releases_activations() => in_flight = in_flight.saturating_sub(1),
            _ => {}
        }
    }
    peak
}

/// Runs every rank through its actions. Sends do not block, so a rank waits only for the inputs of its next
/// action; if all ranks wait, the schedule deadlocks.
pub fn simulate(schedule: &Schedule, costs: &Costs) -> Result<Timeline, ScheduleError> {
    let mut run = Simulation {
        schedule,
        costs,
        ended: vec![None; 4 * schedule.num_stages() * schedule.num_microbatches],
        ranks: vec![Vec::new(); schedule.num_ranks()],
    };
    loop {
        let mut advanced = false;
        for rank in 0..schedule.num_ranks() {
            advanced |= run.advance(rank)?;
        }
        if !advanced {
            break;
        }
    }
    match run.waiting() {
        waiting if waiting.is_empty() => Ok(Timeline { ranks: run.ranks }),
        waiting => Err(ScheduleError::Deadlock { waiting }),
    }
}

struct Simulation<'a> {
    schedule: &'a Schedule,
    costs: &'a Costs,
    /// End time of each finished task.
    ended: Vec<Option<f64>>,
    ranks: Vec<Vec<Span>>,
}

impl Simulation<'_> {
    /// Runs the actions of a rank that can start now. Returns whether there were any.
    fn advance(&mut self, rank: usize) -> Result<bool, ScheduleError> {
        let before = self.ranks[rank].len();
        while let Some(action) = self.schedule.ranks[rank].get(self.ranks[rank].len()) {
            let Some(ready) = self.ready(rank, action)? else {
                break;
            };
            let free = self.ranks[rank].last().map_or(0.0, |span| span.end);
            let start = free.max(ready);
            let end = start + self.costs.of_action(action);
            for task in action.tasks() {
                let slot = self.slot(task)?;
                self.ended[slot] = Some(end);
            }
            self.ranks[rank].push(Span {
                action: *action,
                start,
                end,
            });
        }
        Ok(self.ranks[rank].len() > before)
    }

    /// The time at which all inputs of an action are available; none if one of them is not computed yet.
    fn ready(&self, rank: usize, action: &Action) -> Result<Option<f64>, ScheduleError> {
        let mut ready = 0f64;
        for task in action.tasks() {
            for dependency in self.dependencies(task) {
                let Some(end) = dependency.into_iter().find_map(|slot| self.ended[slot.0]) else {
                    return Ok(None);
                };
                let owner = self.schedule.stage_to_rank[dependency[0].1];
                let transfer = if owner == rank {
                    0.0
                } else {
                    self.costs.transfer
                };
                ready = ready.max(end + transfer);
            }
            self.slot(task)?;
        }
        Ok(Some(ready))
    }

    /// The dependencies of a task: for each, two alternative slots of which one must have ended, and their stage.
    fn dependencies(&self, task: Task) -> Vec<[(usize, usize); 2]> {
        let at = |stage: usize, compute_type: ComputeType| {
            let task = Task::new(stage, compute_type, task.microbatch);
            (self.slot(task).unwrap_or(0), stage)
        };
        let either = |stage, a, b| [at(stage, a), at(stage, b)];
        let only = |stage, compute_type| [at(stage, compute_type); 2];
        let last = self.schedule.num_stages() - 1;
        match task.compute_type {
            ComputeType::Forward if task.stage == 0 => Vec::new(),
            ComputeType::Forward => vec![only(task.stage - 1, ComputeType::Forward)],
            ComputeType::BackwardWeight => vec![only(task.stage, ComputeType::BackwardInput)],
            _ if task.stage >= last => vec![only(task.stage, ComputeType::Forward)],
            _ => vec![
                only(task.stage, ComputeType::Forward),
                either(
                    task.stage + 1,
                    ComputeType::Backward,
                    ComputeType::BackwardInput,
                ),
            ],
        }
    }

    fn slot(&self, task: Task) -> Result<usize, ScheduleError> {
        let (num_stages, num_microbatches) =
            (self.schedule.num_stages(), self.schedule.num_microbatches);
        if task.stage >= num_stages || task.microbatch >= num_microbatches {
            return Err(ScheduleError::OutOfRange {
                task,
                num_stages,
                num_microbatches,
            });
        }
        let index = task.stage * num_microbatches + task.microbatch;
        Ok(4 * index + task.compute_type as usize)
    }

    fn waiting(&self) -> Vec<String> {
        let ranks = self.schedule.ranks.iter().zip(&self.ranks).enumerate();
        ranks
            .filter_map(|(rank, (actions, done))| {
                let next = actions.get(done.len())?;
                Some(format!("rank {rank} waits to start {next}"))
            })
            .collect()
    }
}
