//! Schedules lowered to instructions, so that the executor decides nothing.
//!
//! A [`Schedule`] orders the computations. A [`Program`] adds the send/recv between stages and, for sharded
//! stages, when parameters are unsharded and resharded and when gradients are reduced.

use std::collections::{HashMap, VecDeque};
use std::fmt;

use crate::{Action, ComputeType, Schedule, Task};

/// One instruction of a rank's program.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub enum Instruction {
    /// Computes on micro-batches.
    Compute(Action),
    /// Posts a receive; the task that needs the message waits for it.
    Receive(Message),
    /// Starts to send the output of a task.
    Send(Message),
    /// Waits for a send that is known to be complete, so that its memory is released.
    WaitSend(Message),
    /// Gathers the stage's parameters until they are resharded.
    Unshard(usize),
    /// Releases the stage's gathered parameters.
    Reshard(usize),
    /// Reduces the stage's gradients, which are unsharded until then.
    Reduce(usize),
}

/// A message between neighboring stages: activations forward, their gradients backward.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub struct Message {
    /// The sending stage.
    pub from: usize,
    /// The receiving stage.
    pub to: usize,
    /// The micro-batch.
    pub microbatch: usize,
}

impl Message {
    const fn letter(self) -> char {
        if self.from < self.to { 'F' } else { 'B' }
    }
}

/// PyTorch's notation, extended by `WAIT_SEND`.
impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Instruction::Compute(action) => action.fmt(f),
            Instruction::Receive(m) => write!(f, "{}RECV_{}{}", m.to, m.letter(), m.microbatch),
            Instruction::Send(m) => write!(f, "{}SEND_{}{}", m.from, m.letter(), m.microbatch),
            Instruction::WaitSend(m) => {
                write!(f, "{}WAIT_SEND_{}{}", m.from, m.letter(), m.microbatch)
            }
            Instruction::Unshard(stage) => write!(f, "{stage}UNSHARD"),
            Instruction::Reshard(stage) => write!(f, "{stage}RESHARD"),
            Instruction::Reduce(stage) => write!(f, "{stage}REDUCE_GRAD"),
        }
    }
}

/// When the gradients of a stage are reduced.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub enum GradReduction {
    /// Once per step, with the last backward; until then the stage holds unsharded gradients.
    #[default]
    Once,
    /// With every backward: more communication, but no unsharded gradients are held.
    EveryBackward,
}

/// When a pipeline unshards the parameters of its stages and reduces their gradients.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct ShardingPolicy {
    /// When gradients are reduced.
    pub grad_reduction: GradReduction,
    /// The maximum number of stages that a rank keeps unsharded at a time; none if the stages gather their
    /// parameters themselves or are not sharded.
    pub max_unsharded: Option<usize>,
}

/// The instructions of all ranks.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Program {
    /// The instructions of each rank, in order.
    pub ranks: Vec<Vec<Instruction>>,
}

impl Schedule {
    /// Lowers the schedule to instructions under a sharding policy.
    pub fn program(&self, policy: ShardingPolicy) -> Program {
        let ranks = 0..self.num_ranks();
        let mut program = Program {
            ranks: ranks.map(|rank| self.instructions(rank, policy)).collect(),
        };
        program.order_receives(self);
        program.insert_wait_sends(self);
        program
    }

    fn instructions(&self, rank: usize, policy: ShardingPolicy) -> Vec<Instruction> {
        let actions = &self.ranks[rank];
        let last = last_grad_tasks(actions);
        let reduces = |task: &Task| match policy.grad_reduction {
            GradReduction::EveryBackward => task.compute_type.releases_activations(),
            GradReduction::Once => last.get(&task.stage) == Some(task),
        };
        let mut gathered = policy
            .max_unsharded
            .map(|most| UnshardedStages::new(most, actions));
        let mut list = Vec::new();
        for (number, action) in actions.iter().enumerate() {
            // Receives of the next action are posted before this one computes, so that they overlap.
            let soon = if number == 0 {
                0..2
            } else {
                number + 1..number + 2
            };
            let soon = soon.filter_map(|number| actions.get(number));
            let needs = soon
                .flat_map(Action::tasks)
                .filter_map(|task| self.recv_for(task));
            list.extend(needs.map(Instruction::Receive));
            if let Some(gathered) = &mut gathered {
                gathered.before(number, &mut list);
            }
            list.push(Instruction::Compute(*action));
            let gives = action.tasks().filter_map(|task| self.send_for(task));
            list.extend(gives.map(Instruction::Send));
            let complete = action.tasks().filter(reduces);
            list.extend(complete.map(|task| Instruction::Reduce(task.stage)));
            if let Some(gathered) = &mut gathered {
                gathered.after(number, &mut list);
            }
        }
        list
    }

    /// The message that a task receives from another rank.
    pub fn recv_for(&self, task: Task) -> Option<Message> {
        let from = match task.compute_type {
            ComputeType::Forward => task.stage.checked_sub(1)?,
            kind if kind.produces_input_grad() => task.stage + 1,
            _ => return None,
        };
        self.between(from, task.stage, task.microbatch)
    }

    /// Whether an action uses a message.
    fn uses(&self, action: &Action, message: &Message) -> bool {
        let mut needs = action.tasks().filter_map(|task| self.recv_for(task));
        needs.any(|needed| needed == *message)
    }

    /// The message that a task sends to another rank.
    pub fn send_for(&self, task: Task) -> Option<Message> {
        let to = match task.compute_type {
            ComputeType::Forward => task.stage + 1,
            kind if kind.produces_input_grad() => task.stage.checked_sub(1)?,
            _ => return None,
        };
        self.between(task.stage, to, task.microbatch)
    }

    /// The message between two stages, if both exist and are on different ranks.
    fn between(&self, from: usize, to: usize, microbatch: usize) -> Option<Message> {
        let crosses = self.stage_to_rank.get(from)? != self.stage_to_rank.get(to)?;
        let message = Message {
            from,
            to,
            microbatch,
        };
        crosses.then_some(message)
    }
}

impl Program {
    /// Posts the receives of each rank in the order in which their sender sends them, since NCCL matches the messages
    /// between two ranks by their order alone. A receive is posted earlier where the order demands it, never later.
    fn order_receives(&mut self, schedule: &Schedule) {
        let rank_of = |stage: usize| schedule.stage_to_rank[stage];
        let mut unposted: HashMap<(usize, usize), VecDeque<Message>> = HashMap::new();
        for instruction in self.ranks.iter().flatten() {
            if let Instruction::Send(message) = *instruction {
                let pair = (rank_of(message.from), rank_of(message.to));
                unposted.entry(pair).or_default().push_back(message);
            }
        }
        for list in &mut self.ranks {
            let mut ordered = Vec::with_capacity(list.len());
            for instruction in list.drain(..) {
                let Instruction::Receive(needed) = instruction else {
                    ordered.push(instruction);
                    continue;
                };
                let pair = (rank_of(needed.from), rank_of(needed.to));
                let queue = unposted.entry(pair).or_default();
                // If it is not in the queue, another receive has brought it along.
                let num_due = queue.iter().position(|message| *message == needed);
                let due = queue.drain(..num_due.map_or(0, |position| position + 1));
                ordered.extend(due.map(Instruction::Receive));
            }
            *list = ordered;
        }
    }

    /// Adds a wait for every send that is known to be complete: a rank that has received a message knows that its
    /// sender had already used what it received before.
    fn insert_wait_sends(&mut self, schedule: &Schedule) {
        let acknowledged: Vec<_> = (0..self.ranks.len())
            .map(|rank| self.acknowledged_sends(rank, schedule))
            .collect();
        for (list, mut acknowledged) in self.ranks.iter_mut().zip(acknowledged) {
            let mut extended = Vec::with_capacity(2 * list.len());
            let mut posted = Vec::new();
            for instruction in list.drain(..) {
                extended.push(instruction);
                match instruction {
                    Instruction::Receive(message) => posted.push(message),
                    Instruction::Compute(action) => {
                        for message in posted.extract_if(.., |m| schedule.uses(&action, m)) {
                            let sends = acknowledged.remove(&message).unwrap_or_default();
                            extended.extend(sends.into_iter().map(Instruction::WaitSend));
                        }
                    }
                    _ => {}
                }
            }
            *list = extended;
        }
    }

    /// For each message that `rank` receives: its sends that are complete once that message is there.
    fn acknowledged_sends(
        &self,
        rank: usize,
        schedule: &Schedule,
    ) -> HashMap<Message, Vec<Message>> {
        let stage_to_rank = &schedule.stage_to_rank;
        let mut acknowledged = HashMap::new();
        for list in &self.ranks {
            let (mut posted, mut used) = (Vec::new(), Vec::new());
            for instruction in list {
                match instruction {
                    Instruction::Receive(sent) if stage_to_rank[sent.from] == rank => {
                        posted.push(*sent)
                    }
                    Instruction::Compute(action) => {
                        used.extend(posted.extract_if(.., |sent| schedule.uses(action, sent)));
                    }
                    Instruction::Send(reply) if stage_to_rank[reply.to] == rank => {
                        acknowledged.insert(*reply, std::mem::take(&mut used));
                    }
                    _ => {}
                }
            }
        }
        acknowledged
    }
}

/// The task that completes the gradients of each stage.
fn last_grad_tasks(actions: &[Action]) -> HashMap<usize, Task> {
    let tasks = actions.iter().flat_map(Action::tasks);
    let ends = tasks.filter(|task| task.compute_type.releases_activations());
    ends.map(|task| (task.stage, task)).collect()
}

/// Tracks the unsharded stages of a rank while its program is generated.
struct UnshardedStages<'a> {
    most: usize,
    actions: &'a [Action],
    stages: Vec<usize>,
}

impl UnshardedStages<'_> {
    /// An overlapped pair may use two stages at once, so the limit is at least two if there are pairs.
    fn new(most: usize, actions: &[Action]) -> UnshardedStages<'_> {
        let pairs = actions
            .iter()
            .any(|action| matches!(action, Action::Overlapped(..)));
        UnshardedStages {
            most: most.max(if pairs { 2 } else { 1 }),
            actions,
            stages: Vec::new(),
        }
    }

    /// Unshards the stages of action `number`, and those of the next action within the limit.
    fn before(&mut self, number: usize, list: &mut Vec<Instruction>) {
        let needed = stages_read(&self.actions[number]);
        for &stage in &needed {
            if self.stages.contains(&stage) {
                continue;
            }
            while self.stages.len() >= self.most
                && let Some(idle) = self.furthest_use(number, &needed)
            {
                self.stages.retain(|&s| s != idle);
                list.push(Instruction::Reshard(idle));
            }
            self.stages.push(stage);
            list.push(Instruction::Unshard(stage));
        }
        let next = self.actions.get(number + 1).map(stages_read);
        for stage in next.unwrap_or_default() {
            if !self.stages.contains(&stage) && self.stages.len() < self.most {
                self.stages.push(stage);
                list.push(Instruction::Unshard(stage));
            }
        }
    }

    /// Reshards the stages that no later action uses.
    fn after(&mut self, number: usize, list: &mut Vec<Instruction>) {
        let is_unused = |stage: &usize| self.next_use(*stage, number + 1).is_none();
        let (unused, rest) = self.stages.iter().partition(|stage| is_unused(stage));
        let unused: Vec<usize> = unused;
        self.stages = rest;
        list.extend(unused.into_iter().map(Instruction::Reshard));
    }

    /// The unsharded stage whose next use is furthest away, except those needed now.
    fn furthest_use(&self, number: usize, needed: &[usize]) -> Option<usize> {
        let idle = self.stages.iter().filter(|stage| !needed.contains(stage));
        let until = |stage: &&usize| self.next_use(**stage, number).unwrap_or(usize::MAX);
        idle.max_by_key(until).copied()
    }

    fn next_use(&self, stage: usize, from: usize) -> Option<usize> {
        let rest = self.actions.iter().enumerate().skip(from);
        let mut uses = rest.filter(|(_, action)| stages_read(action).contains(&stage));
        uses.next().map(|(number, _)| number)
    }
}

/// The stages whose parameters an action reads. Weight gradients do not read parameters.
fn stages_read(action: &Action) -> Vec<usize> {
    let tasks = action.tasks();
    let needing = tasks.filter(|task| task.compute_type != ComputeType::BackwardWeight);
    needing.map(|task| task.stage).collect()
}
