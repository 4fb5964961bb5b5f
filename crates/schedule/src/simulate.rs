//! When everything happens, if work takes as long as it is said to.

use crate::{Action, Schedule, ScheduleError, Task, Work};

/// How long work takes, in any unit.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// Of each stage; a single entry counts for all.
    stages: Vec<StageCost>,
    /// From a stage to the next where another rank holds it, beside computation.
    pub transfer: f64,
    /// What a forward and a backward beside each other take, over what they take one after the other.
    pub overlap: f64,
}

/// Of one stage.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub(crate) struct StageCost {
    pub forward: f64,
    pub backward: f64,
    pub backward_input: f64,
    pub backward_weight: f64,
}

impl StageCost {
    /// A whole backward takes as long as its two parts.
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
    /// The same for every stage; a whole backward takes as long as its two parts.
    pub fn uniform(forward: f64, backward_input: f64, backward_weight: f64) -> Costs {
        Costs::new(vec![StageCost::new(
            forward,
            backward_input,
            backward_weight,
        )])
    }

    /// `(forward, backward for input, backward for weight)` of each stage.
    pub fn of_stages(stages: &[(f64, f64, f64)]) -> Costs {
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
        match task.work {
            Work::Forward => cost.forward,
            Work::BackwardInput => cost.backward_input,
            Work::BackwardWeight => cost.backward_weight,
            Work::Backward => cost.backward,
        }
    }

    fn of_action(&self, action: &Action) -> f64 {
        let alone: f64 = action.tasks().map(|task| self.of(task)).sum();
        match action {
            Action::One(_) => alone,
            Action::Both(..) => alone * self.overlap,
        }
    }
}

/// An action and when it takes place.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Span {
    /// What.
    pub action: Action,
    /// From.
    pub start: f64,
    /// To.
    pub end: f64,
}

/// What every rank does when.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// The spans of each rank, in order.
    pub ranks: Vec<Vec<Span>>,
}

impl Timeline {
    /// When the last rank has ended.
    pub fn end(&self) -> f64 {
        let ends = self.ranks.iter().filter_map(|spans| spans.last());
        ends.map(|span| span.end).fold(0.0, f64::max)
    }

    /// How long `rank` works.
    pub fn busy(&self, rank: usize) -> f64 {
        self.ranks[rank].iter().map(|s| s.end - s.start).sum()
    }

    /// How long `rank` waits between its first action and its last.
    pub fn waits(&self, rank: usize) -> f64 {
        match &self.ranks[rank][..] {
            [first, .., last] => last.end - first.start - self.busy(rank),
            _ => 0.0,
        }
    }

    /// How long the rank waits that waits most. Before its first action and after its last a rank has
    /// the step before and the step after to do.
    pub fn bubble(&self) -> f64 {
        let ranks = 0..self.ranks.len();
        ranks.map(|rank| self.waits(rank)).fold(0.0, f64::max)
    }

    /// Micro-batches each rank keeps something of at once, at most; counted per stage.
    pub fn most_in_flight(&self) -> Vec<usize> {
        self.ranks.iter().map(|spans| peak(spans)).collect()
    }
}

fn peak(spans: &[Span]) -> usize {
    let (mut held, mut most) = (0usize, 0);
    for task in spans.iter().flat_map(|span| span.action.tasks()) {
        match task.work {
            Work::Forward => {
                held += 1;
                most = most.max(held);
            }
            work if work.releases() => held = held.saturating_sub(1),
            _ => {}
        }
    }
    most
}

/// Follows every rank through its list. Messages wait for nobody, so a rank waits only for what its
/// next action needs; where all wait, the schedule can never end.
pub fn simulate(schedule: &Schedule, costs: &Costs) -> Result<Timeline, ScheduleError> {
    let mut run = Run {
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

struct Run<'a> {
    schedule: &'a Schedule,
    costs: &'a Costs,
    /// When each task ended.
    ended: Vec<Option<f64>>,
    ranks: Vec<Vec<Span>>,
}

impl Run<'_> {
    /// Takes as many actions of a rank as can be taken now. Returns whether there were any.
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

    /// When everything an action needs is there; none while it is not known.
    fn ready(&self, rank: usize, action: &Action) -> Result<Option<f64>, ScheduleError> {
        let mut ready = 0f64;
        for task in action.tasks() {
            for need in self.needs(task) {
                let Some(end) = need.into_iter().find_map(|slot| self.ended[slot.0]) else {
                    return Ok(None);
                };
                let holder = self.schedule.holders[need[0].1];
                let travels = if holder == rank {
                    0.0
                } else {
                    self.costs.transfer
                };
                ready = ready.max(end + travels);
            }
            self.slot(task)?;
        }
        Ok(Some(ready))
    }

    /// Slots of which one must have ended, with the stage they are of, for each thing a task needs.
    fn needs(&self, task: Task) -> Vec<[(usize, usize); 2]> {
        let at = |stage: usize, work: Work| {
            let task = Task::new(stage, work, task.microbatch);
            (self.slot(task).unwrap_or(0), stage)
        };
        let either = |stage, a, b| [at(stage, a), at(stage, b)];
        let only = |stage, work| [at(stage, work); 2];
        let last = self.schedule.num_stages() - 1;
        match task.work {
            Work::Forward if task.stage == 0 => Vec::new(),
            Work::Forward => vec![only(task.stage - 1, Work::Forward)],
            Work::BackwardWeight => vec![only(task.stage, Work::BackwardInput)],
            _ if task.stage >= last => vec![only(task.stage, Work::Forward)],
            _ => vec![
                only(task.stage, Work::Forward),
                either(task.stage + 1, Work::Backward, Work::BackwardInput),
            ],
        }
    }

    fn slot(&self, task: Task) -> Result<usize, ScheduleError> {
        let (num_stages, num_microbatches) =
            (self.schedule.num_stages(), self.schedule.num_microbatches);
        if task.stage >= num_stages || task.microbatch >= num_microbatches {
            return Err(ScheduleError::Outside {
                task,
                num_stages,
                num_microbatches,
            });
        }
        let place = task.stage * num_microbatches + task.microbatch;
        Ok(4 * place + task.work as usize)
    }

    fn waiting(&self) -> Vec<String> {
        let ranks = self.schedule.ranks.iter().zip(&self.ranks).enumerate();
        ranks
            .filter_map(|(rank, (actions, done))| {
                let next = actions.get(done.len())?;
                Some(format!("rank {rank} cannot begin {next}"))
            })
            .collect()
    }
}
