//! A schedule with everything a rank does between its tasks, so that an executor decides nothing.
//!
//! A [`Schedule`] says what is computed in which order. A [`Program`] adds the messages between
//! stages and, for stages whose states other ranks share, when they are gathered, released and their
//! gradients reduced.

use std::collections::HashMap;
use std::fmt;

use crate::{Action, Schedule, Task, Work};

/// One entry of a rank's program.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub enum Instruction {
    /// Work on micro-batches.
    Compute(Action),
    /// What a later task needs is asked for; the task waits for it.
    Receive(Message),
    /// What a task made leaves.
    Send(Message),
    /// A message that was sent has arrived, as an answer shows: its memory may go.
    Arrived(Message),
    /// The stage's parameters are gathered, and stay.
    Unshard(usize),
    /// The stage's parameters go.
    Reshard(usize),
    /// The stage's gradients, which were kept whole so far, are reduced.
    Reduce(usize),
}

/// What goes from a stage to its neighbour: activations forward, their gradients back.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub struct Message {
    /// The stage that makes it.
    pub from: usize,
    /// The stage that needs it.
    pub to: usize,
    /// Of which micro-batch.
    pub microbatch: usize,
}

impl Message {
    const fn letter(self) -> char {
        if self.from < self.to { 'F' } else { 'B' }
    }
}

/// As PyTorch writes them.
impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Instruction::Compute(action) => action.fmt(f),
            Instruction::Receive(m) => write!(f, "{}RECV_{}{}", m.to, m.letter(), m.microbatch),
            Instruction::Send(m) => write!(f, "{}SEND_{}{}", m.from, m.letter(), m.microbatch),
            Instruction::Arrived(m) => {
                write!(f, "{}ARRIVED_{}{}", m.from, m.letter(), m.microbatch)
            }
            Instruction::Unshard(stage) => write!(f, "{stage}UNSHARD"),
            Instruction::Reshard(stage) => write!(f, "{stage}RESHARD"),
            Instruction::Reduce(stage) => write!(f, "{stage}REDUCE_GRAD"),
        }
    }
}

/// When a stage's gradients are reduced.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub enum Reductions {
    /// With its last backward. Until then they are held whole.
    #[default]
    Once,
    /// With every backward: as many times the messages, and nothing held whole.
    Each,
}

/// How the states of stages are shared, as far as the order of work goes.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Sharing {
    /// When gradients are reduced.
    pub reductions: Reductions,
    /// How many of its stages a rank holds gathered at once; none where stages see to it themselves,
    /// or have nothing to gather.
    pub most_unsharded: Option<usize>,
}

/// What every rank does, in order.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Program {
    /// The instructions of each rank.
    pub ranks: Vec<Vec<Instruction>>,
}

impl Schedule {
    /// The schedule with its messages and what `sharing` asks for.
    pub fn program(&self, sharing: Sharing) -> Program {
        let ranks = 0..self.num_ranks();
        let mut program = Program {
            ranks: ranks.map(|rank| self.instructions(rank, sharing)).collect(),
        };
        program.note_arrivals(self);
        program
    }

    fn instructions(&self, rank: usize, sharing: Sharing) -> Vec<Instruction> {
        let actions = &self.ranks[rank];
        let last = last_of_stages(actions);
        let reduces = |task: &Task| match sharing.reductions {
            Reductions::Each => task.work.releases(),
            Reductions::Once => last.get(&task.stage) == Some(task),
        };
        let mut gathered = sharing
            .most_unsharded
            .map(|most| Gathered::new(most, actions));
        let mut list = Vec::new();
        for (number, action) in actions.iter().enumerate() {
            // What comes next is asked for before this is computed, so that it travels meanwhile.
            let soon = if number == 0 {
                0..2
            } else {
                number + 1..number + 2
            };
            let soon = soon.filter_map(|number| actions.get(number));
            let needs = soon
                .flat_map(Action::tasks)
                .filter_map(|task| self.needs(task));
            list.extend(needs.map(Instruction::Receive));
            if let Some(gathered) = &mut gathered {
                gathered.before(number, &mut list);
            }
            list.push(Instruction::Compute(*action));
            let gives = action.tasks().filter_map(|task| self.gives(task));
            list.extend(gives.map(Instruction::Send));
            let complete = action.tasks().filter(reduces);
            list.extend(complete.map(|task| Instruction::Reduce(task.stage)));
            if let Some(gathered) = &mut gathered {
                gathered.after(number, &mut list);
            }
        }
        list
    }

    /// What a task needs of another rank.
    pub fn needs(&self, task: Task) -> Option<Message> {
        let from = match task.work {
            Work::Forward => task.stage.checked_sub(1)?,
            work if work.gives_gradient() => task.stage + 1,
            _ => return None,
        };
        self.between(from, task.stage, task.microbatch)
    }

    /// Whether an action computes with a message.
    fn uses(&self, action: &Action, message: &Message) -> bool {
        let mut needs = action.tasks().filter_map(|task| self.needs(task));
        needs.any(|needed| needed == *message)
    }

    /// What a task gives to another rank.
    pub fn gives(&self, task: Task) -> Option<Message> {
        let to = match task.work {
            Work::Forward => task.stage + 1,
            work if work.gives_gradient() => task.stage.checked_sub(1)?,
            _ => return None,
        };
        self.between(task.stage, to, task.microbatch)
    }

    /// A message, where both stages exist and different ranks hold them.
    fn between(&self, from: usize, to: usize, microbatch: usize) -> Option<Message> {
        let crosses = self.holders.get(from)? != self.holders.get(to)?;
        let message = Message {
            from,
            to,
            microbatch,
        };
        crosses.then_some(message)
    }
}

impl Program {
    /// Where a rank has waited for a message, everything its sender had received by then has arrived.
    fn note_arrivals(&mut self, schedule: &Schedule) {
        let answers: Vec<_> = (0..self.ranks.len())
            .map(|rank| self.answers(rank, schedule))
            .collect();
        for (list, mut answers) in self.ranks.iter_mut().zip(answers) {
            let mut noted = Vec::with_capacity(2 * list.len());
            let mut asked = Vec::new();
            for instruction in list.drain(..) {
                noted.push(instruction);
                match instruction {
                    Instruction::Receive(message) => asked.push(message),
                    Instruction::Compute(action) => {
                        for message in asked.extract_if(.., |m| schedule.uses(&action, m)) {
                            let arrived = answers.remove(&message).unwrap_or_default();
                            noted.extend(arrived.into_iter().map(Instruction::Arrived));
                        }
                    }
                    _ => {}
                }
            }
            *list = noted;
        }
    }

    /// By message that `rank` gets: those it sent that have arrived if this one has.
    fn answers(&self, rank: usize, schedule: &Schedule) -> HashMap<Message, Vec<Message>> {
        let holders = &schedule.holders;
        let mut answers = HashMap::new();
        for list in &self.ranks {
            let (mut asked, mut taken) = (Vec::new(), Vec::new());
            for instruction in list {
                match instruction {
                    Instruction::Receive(sent) if holders[sent.from] == rank => asked.push(*sent),
                    Instruction::Compute(action) => {
                        taken.extend(asked.extract_if(.., |sent| schedule.uses(action, sent)));
                    }
                    Instruction::Send(answer) if holders[answer.to] == rank => {
                        answers.insert(*answer, std::mem::take(&mut taken));
                    }
                    _ => {}
                }
            }
        }
        answers
    }
}

/// The task with which each stage's gradients are complete.
fn last_of_stages(actions: &[Action]) -> HashMap<usize, Task> {
    let tasks = actions.iter().flat_map(Action::tasks);
    let ends = tasks.filter(|task| task.work.releases());
    ends.map(|task| (task.stage, task)).collect()
}

/// Which stages of a rank are gathered, while its program is written.
struct Gathered<'a> {
    most: usize,
    actions: &'a [Action],
    stages: Vec<usize>,
}

impl Gathered<'_> {
    /// Every action needs its stages at once, and a pair of tasks may have two.
    fn new(most: usize, actions: &[Action]) -> Gathered<'_> {
        let pairs = actions
            .iter()
            .any(|action| matches!(action, Action::Both(..)));
        Gathered {
            most: most.max(if pairs { 2 } else { 1 }),
            actions,
            stages: Vec::new(),
        }
    }

    /// Gathers what action `number` needs, and what the next does if there is room.
    fn before(&mut self, number: usize, list: &mut Vec<Instruction>) {
        let needed = computing(&self.actions[number]);
        for &stage in &needed {
            if self.stages.contains(&stage) {
                continue;
            }
            while self.stages.len() >= self.most
                && let Some(idle) = self.idlest(number, &needed)
            {
                self.stages.retain(|&s| s != idle);
                list.push(Instruction::Reshard(idle));
            }
            self.stages.push(stage);
            list.push(Instruction::Unshard(stage));
        }
        let next = self.actions.get(number + 1).map(computing);
        for stage in next.unwrap_or_default() {
            if !self.stages.contains(&stage) && self.stages.len() < self.most {
                self.stages.push(stage);
                list.push(Instruction::Unshard(stage));
            }
        }
    }

    /// Lets go of what is needed no more.
    fn after(&mut self, number: usize, list: &mut Vec<Instruction>) {
        let is_over = |stage: &usize| self.next_use(*stage, number + 1).is_none();
        let (over, rest) = self.stages.iter().partition(|stage| is_over(stage));
        let over: Vec<usize> = over;
        self.stages = rest;
        list.extend(over.into_iter().map(Instruction::Reshard));
    }

    /// The gathered stage that is needed last, but for those needed now.
    fn idlest(&self, number: usize, needed: &[usize]) -> Option<usize> {
        let idle = self.stages.iter().filter(|stage| !needed.contains(stage));
        let until = |stage: &&usize| self.next_use(**stage, number).unwrap_or(usize::MAX);
        idle.max_by_key(until).copied()
    }

    fn next_use(&self, stage: usize, from: usize) -> Option<usize> {
        let rest = self.actions.iter().enumerate().skip(from);
        let mut uses = rest.filter(|(_, action)| computing(action).contains(&stage));
        uses.next().map(|(number, _)| number)
    }
}

/// Stages whose parameters an action computes with. Gradients of weights need none.
fn computing(action: &Action) -> Vec<usize> {
    let tasks = action.tasks();
    let needing = tasks.filter(|task| task.work != Work::BackwardWeight);
    needing.map(|task| task.stage).collect()
}
