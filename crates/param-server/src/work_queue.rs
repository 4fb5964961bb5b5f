//! Which samples a worker computes next, and which gradients are applied next.
//!
//! The samples of training are a sequence of micro-batches, and every step has the same number of them. A worker takes a
//! [`Piece`]: consecutive micro-batches of one step. Its gradient is applied once, whoever computed it: the pieces of a lost
//! worker are handed out again.
//!
//! Staleness is bounded in steps: a piece of step `t` is handed out only if all gradients of steps before `t - s` have been
//! applied. That is the rule of stale synchronous parallel training, where a worker at clock `t` waits for workers behind clock
//! `t - s`; here a faster worker computes more pieces instead of waiting. With `s = 0`, the gradients of a step are
//! applied together, as one update.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// A worker, as the leader has numbered it. A worker that joins again has another number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WorkerId(pub u64);

/// Consecutive micro-batches of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Piece {
    /// The step, counted from 0.
    pub step: u64,
    /// The first micro-batch, counted from the first one of the step.
    pub first: u64,
    /// The number of micro-batches.
    pub num: u64,
}

/// Pieces whose gradients are applied together, in the order of their samples.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Update {
    /// The pieces.
    pub pieces: Vec<Piece>,
}

/// What a worker does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// It computes this piece.
    Piece(Piece),
    /// It asks again, because earlier gradients are missing.
    Wait,
    /// It exits, because all gradients have been applied.
    Done,
}

/// The work of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkQueueOptions {
    /// Micro-batches of one step.
    pub microbatches_per_step: u64,
    /// Micro-batches of one piece, unless pieces are balanced. It does not follow the number of workers, so the gradients
    /// of a step are the same sums when a worker is lost.
    pub microbatches_per_piece: u64,
    /// Steps of the run.
    pub num_steps: u64,
    /// How many steps ahead of the oldest incomplete one a worker may be; `None` if there is no bound.
    pub max_staleness: Option<u64>,
    /// Whether the pieces of a worker are as large as its share of the measured speed of all workers.
    pub is_balanced: bool,
}

/// Which gradients have been applied, for checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps before this one are complete.
    pub step: u64,
    /// The pieces of later steps that have been applied.
    pub applied: Vec<Piece>,
}

#[derive(Clone, Debug, Default)]
struct Worker {
    /// Pieces that it has taken and not pushed.
    taken: BTreeSet<Piece>,
    /// Micro-batches per second.
    speed: Option<f64>,
}

/// The state of the work: which pieces are taken, pushed and applied.
#[derive(Clone, Debug)]
pub struct WorkQueue {
    options: WorkQueueOptions,
    /// All gradients of steps before this one have been applied.
    oldest_step: u64,
    /// Applied pieces of later steps.
    applied: BTreeSet<Piece>,
    /// Pieces that have been pushed and wait for others of their step.
    pushed: BTreeSet<Piece>,
    /// Pieces of updates that have been returned and not been applied yet.
    in_updates: BTreeSet<Piece>,
    /// Pieces that no worker has taken, by step.
    free: BTreeMap<u64, Vec<Piece>>,
    /// Steps from this one on are free as a whole.
    next_step: u64,
    workers: BTreeMap<WorkerId, Worker>,
    num_joined: u64,
}

impl WorkQueue {
    /// The work that is left after `progress`.
    pub fn new(options: WorkQueueOptions, progress: &Progress) -> WorkQueue {
        let options = WorkQueueOptions {
            microbatches_per_step: options.microbatches_per_step.max(1),
            microbatches_per_piece: options.microbatches_per_piece.max(1),
            ..options
        };
        let applied: BTreeSet<Piece> = progress.applied.iter().copied().collect();
        let last = applied.iter().map(|piece| piece.step).max();
        let next_step = last.map_or(progress.step, |last| last + 1);
        let steps = progress.step..next_step;
        let gaps = |step| {
            let of_step = applied.iter().copied();
            let of_step = of_step.filter(|piece| piece.step == step);
            gaps(step, of_step, options.microbatches_per_step)
        };
        WorkQueue {
            options,
            oldest_step: progress.step,
            free: steps.map(|step| (step, gaps(step))).collect(),
            applied,
            pushed: BTreeSet::new(),
            in_updates: BTreeSet::new(),
            next_step,
            workers: BTreeMap::new(),
            num_joined: 0,
        }
    }

    /// Adds a worker.
    pub fn join(&mut self) -> WorkerId {
        let id = WorkerId(self.num_joined);
        self.num_joined += 1;
        self.workers.insert(id, Worker::default());
        id
    }

    /// Removes a worker; others compute what it had taken.
    pub fn leave(&mut self, worker: WorkerId) {
        let worker = self.workers.remove(&worker).unwrap_or_default();
        for piece in worker.taken {
            self.free.entry(piece.step).or_default().push(piece);
        }
    }

    /// The number of workers.
    pub fn num_workers(&self) -> usize {
        self.workers.len()
    }

    /// The next piece of a worker.
    pub fn take(&mut self, worker: WorkerId) -> Take {
        if self.is_complete() {
            return Take::Done;
        }
        let size = self.piece_size(worker);
        let Some(step) = self.first_free_step() else {
            return Take::Wait;
        };
        let free = self.free.entry(step).or_default();
        let Some(member) = self.workers.get_mut(&worker) else {
            return Take::Wait;
        };
        let Some(index) = (0..free.len()).min_by_key(|&index| free[index]) else {
            return Take::Wait;
        };
        let piece = Piece {
            num: free[index].num.min(size),
            ..free[index]
        };
        free[index].first += piece.num;
        free[index].num -= piece.num;
        free.retain(|piece| piece.num > 0);
        member.taken.insert(piece);
        Take::Piece(piece)
    }

    /// Records that a worker has pushed the gradient of a piece, which took `seconds` to compute. Returns what is to be
    /// applied now; `None` if the worker did not have the piece.
    pub fn push(&mut self, worker: WorkerId, piece: Piece, seconds: f64) -> Option<Vec<Update>> {
        let member = self.workers.get_mut(&worker)?;
        if !member.taken.remove(&piece) {
            return None;
        }
        member.observe(piece.num as f64 / seconds);
        self.pushed.insert(piece);
        let updates = self.ready_updates();
        for piece in updates.iter().flat_map(|update| &update.pieces) {
            self.pushed.remove(piece);
            self.in_updates.insert(*piece);
        }
        Some(updates)
    }

    /// Records that an update has been applied.
    pub fn apply(&mut self, update: &Update) {
        for piece in &update.pieces {
            if self.in_updates.remove(piece) {
                self.applied.insert(*piece);
            }
        }
        self.drop_complete_steps();
    }

    /// Whether all gradients have been applied.
    pub fn is_complete(&self) -> bool {
        self.oldest_step >= self.options.num_steps
    }

    /// The number of micro-batches whose gradients have been applied.
    pub fn num_applied(&self) -> u64 {
        let later: u64 = self.applied.iter().map(|piece| piece.num).sum();
        self.oldest_step * self.options.microbatches_per_step + later
    }

    /// What has been applied, for a checkpoint.
    pub fn progress(&self) -> Progress {
        Progress {
            step: self.oldest_step,
            applied: self.applied.iter().copied().collect(),
        }
    }

    /// The first step with free pieces that the bound allows, which becomes divisible if it was free as a whole.
    fn first_free_step(&mut self) -> Option<u64> {
        let found = self.free.iter().find(|(_, pieces)| !pieces.is_empty());
        let step = found.map_or(self.next_step, |(&step, _)| step);
        let is_allowed = self
            .options
            .max_staleness
            .is_none_or(|bound| step - self.oldest_step <= bound);
        if step >= self.options.num_steps || !is_allowed {
            return None;
        }
        if step == self.next_step {
            let whole = Piece {
                step,
                first: 0,
                num: self.options.microbatches_per_step,
            };
            self.free.insert(step, vec![whole]);
            self.next_step += 1;
        }
        Some(step)
    }

    /// How many micro-batches a worker takes at a time. If pieces are balanced, all workers together take a step.
    fn piece_size(&self, worker: WorkerId) -> u64 {
        let total = self.options.microbatches_per_step;
        let speeds: Option<Vec<f64>> = self.workers.values().map(|worker| worker.speed).collect();
        let own = self.workers.get(&worker).and_then(|worker| worker.speed);
        let (Some(speeds), Some(own), true) = (speeds, own, self.options.is_balanced) else {
            return self.options.microbatches_per_piece;
        };
        let share = own / speeds.iter().sum::<f64>();
        ((total as f64 * share).round() as u64).clamp(1, total)
    }

    /// What can be applied: complete steps if training is synchronous, otherwise everything that has been pushed.
    fn ready_updates(&self) -> Vec<Update> {
        if self.options.max_staleness != Some(0) {
            let single = |&piece: &Piece| Update {
                pieces: vec![piece],
            };
            return self.pushed.iter().map(single).collect();
        }
        let num: u64 = self.pushed.iter().map(|piece| piece.num).sum();
        if num < self.options.microbatches_per_step {
            return Vec::new();
        }
        let pieces = self.pushed.iter().copied().collect();
        vec![Update { pieces }]
    }

    fn drop_complete_steps(&mut self) {
        let total = self.options.microbatches_per_step;
        loop {
            let of_oldest = self
                .applied
                .iter()
                .filter(|piece| piece.step == self.oldest_step);
            let num: u64 = of_oldest.map(|piece| piece.num).sum();
            if num < total {
                return;
            }
            let oldest = self.oldest_step;
            self.applied.retain(|piece| piece.step != oldest);
            self.free.remove(&oldest);
            self.oldest_step += 1;
        }
    }
}

impl Worker {
    /// Averages measured speeds, so that one slow piece does not change the division.
    fn observe(&mut self, speed: f64) {
        const SHARE_OF_NEWEST: f64 = 0.3;
        if speed.is_finite() && speed > 0.0 {
            let old = self.speed.unwrap_or(speed);
            self.speed = Some(old + SHARE_OF_NEWEST * (speed - old));
        }
    }
}

/// The pieces of a step that are not among these, which do not overlap.
fn gaps(step: u64, pieces: impl Iterator<Item = Piece>, total: u64) -> Vec<Piece> {
    let mut gaps = Vec::new();
    let mut end = 0;
    let last = Piece {
        step,
        first: total,
        num: 0,
    };
    for piece in pieces.chain([last]) {
        if piece.first > end {
            gaps.push(Piece {
                step,
                first: end,
                num: piece.first - end,
            });
        }
        end = piece.first + piece.num;
    }
    gaps
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const START: Progress = Progress {
        step: 0,
        applied: Vec::new(),
    };

    fn options(max_staleness: Option<u64>) -> WorkQueueOptions {
        WorkQueueOptions {
            microbatches_per_step: 4,
            microbatches_per_piece: 2,
            num_steps: 3,
            max_staleness,
            is_balanced: false,
        }
    }

    fn piece(step: u64, first: u64, num: u64) -> Piece {
        Piece { step, first, num }
    }

    #[test]
    fn a_synchronous_step_is_one_update_in_the_order_of_samples() {
        let mut queue = WorkQueue::new(options(Some(0)), &START);
        let (a, b) = (queue.join(), queue.join());
        assert_eq!(queue.take(a), Take::Piece(piece(0, 0, 2)));
        assert_eq!(queue.take(b), Take::Piece(piece(0, 2, 2)));
        assert_eq!(queue.take(a), Take::Wait);
        assert_eq!(queue.push(b, piece(0, 2, 2), 1.0), Some(vec![]));
        assert_eq!(queue.push(b, piece(0, 2, 2), 1.0), None, "only once");
        let updates = queue.push(a, piece(0, 0, 2), 1.0).unwrap();
        assert_eq!(updates[0].pieces, [piece(0, 0, 2), piece(0, 2, 2)]);
        assert_eq!(queue.take(a), Take::Wait, "it has not been applied");
        assert_eq!(queue.progress(), START);
        queue.apply(&updates[0]);
        assert_eq!(queue.take(a), Take::Piece(piece(1, 0, 2)));
    }

    #[test]
    fn others_compute_the_pieces_of_a_lost_worker() {
        let mut queue = WorkQueue::new(options(Some(0)), &START);
        let (a, b) = (queue.join(), queue.join());
        let (Take::Piece(first), Take::Piece(second)) = (queue.take(a), queue.take(b)) else {
            panic!("no work");
        };
        queue.leave(a);
        assert_eq!(queue.push(a, first, 1.0), None, "it has left");
        assert_eq!(queue.push(b, second, 1.0), Some(vec![]));
        assert_eq!(queue.take(b), Take::Piece(first));
        let update = queue.push(b, first, 1.0).unwrap();
        assert_eq!(update[0].pieces, [first, second]);
    }

    #[test]
    fn a_fast_worker_computes_larger_pieces() {
        let balanced = WorkQueueOptions {
            microbatches_per_step: 8,
            microbatches_per_piece: 4,
            is_balanced: true,
            ..options(None)
        };
        let mut queue = WorkQueue::new(balanced, &START);
        let (fast, slow) = (queue.join(), queue.join());
        for (worker, seconds) in [(fast, 1.0), (slow, 3.0)] {
            let Take::Piece(piece) = queue.take(worker) else {
                panic!("no work");
            };
            assert_eq!(piece.num, 4);
            queue.push(worker, piece, seconds);
        }
        assert_eq!(queue.take(fast), Take::Piece(piece(1, 0, 6)));
        assert_eq!(queue.take(slow), Take::Piece(piece(1, 6, 2)));
    }

    /// Applies updates, and counts the micro-batches in them.
    fn apply(queue: &mut WorkQueue, updates: &[Update], applied: &mut [[u64; 4]]) {
        for update in updates {
            queue.apply(update);
            for piece in &update.pieces {
                let own = piece.first as usize..(piece.first + piece.num) as usize;
                let step = &mut applied[piece.step as usize];
                step[own].iter_mut().for_each(|count| *count += 1);
            }
        }
    }

    /// Lets workers act in any order, lose connections and restart the servers; every micro-batch must be applied once.
    fn simulate(max_staleness: Option<u64>, actions: &[(u8, u8)]) {
        let options = WorkQueueOptions {
            num_steps: 5,
            ..options(max_staleness)
        };
        let mut queue = WorkQueue::new(options, &START);
        let mut applied = vec![[0; 4]; 5];
        let mut workers: Vec<(WorkerId, Vec<Piece>)> = Vec::new();
        let finish = [(0, 0), (1, 0)].repeat(200).into_iter();
        for (action, who) in actions.iter().copied().chain(finish) {
            if workers.is_empty() || action == 3 {
                workers.push((queue.join(), Vec::new()));
            }
            let who = usize::from(who) % workers.len();
            match action {
                0 => {
                    if let Take::Piece(piece) = queue.take(workers[who].0) {
                        let ahead = piece.step - queue.progress().step;
                        assert!(max_staleness.is_none_or(|bound| ahead <= bound));
                        workers[who].1.push(piece);
                    }
                }
                1 => {
                    let (id, taken) = &mut workers[who];
                    let Some(piece) = taken.pop() else { continue };
                    let updates = queue.push(*id, piece, 1.0).unwrap();
                    apply(&mut queue, &updates, &mut applied);
                }
                2 => queue.leave(workers.remove(who).0),
                4 => {
                    let progress = queue.progress();
                    queue = WorkQueue::new(options, &progress);
                    workers.clear();
                }
                _ => {}
            }
        }
        for (worker, _) in workers.drain(..) {
            queue.leave(worker);
        }
        let last = queue.join();
        while let Take::Piece(piece) = queue.take(last) {
            let updates = queue.push(last, piece, 1.0).unwrap();
            apply(&mut queue, &updates, &mut applied);
        }
        assert_eq!(queue.take(last), Take::Done);
        assert_eq!(queue.num_applied(), 20);
        assert_eq!(applied, vec![[1; 4]; 5]);
    }

    proptest! {
        #[test]
        fn every_microbatch_is_applied_once(
            max_staleness in proptest::option::of(0u64..4),
            actions in proptest::collection::vec((0u8..5, 0u8..4), 0..120),
        ) {
            simulate(max_staleness, &actions);
        }
    }
}
