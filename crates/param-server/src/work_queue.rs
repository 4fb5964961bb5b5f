//! Which samples a worker computes next, and which gradients are applied next.
//!
//! The samples of training are a sequence of micro-batches, and every step has the same number of them. A worker takes a
//! [`Piece`]: consecutive micro-batches of one step. Its gradient is applied once, whoever computed it: the pieces of a lost
//! worker are handed out again.
//!
//! Staleness is bounded in steps: a piece of step `t` is handed out only if all gradients of steps before `t - s` have been
//! applied. That is the rule of stale synchronous parallel training, where a worker at clock `t` waits for workers behind clock
//! `t - s`; here a faster worker computes more pieces instead of waiting.
//!
//! The [`UpdateRule`] says which gradients make an update. For replicas that take steps of their own, it is a quorum: an update
//! does not wait for the slowest replica, whose movement is part of a later one.

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

/// Which gradients are applied together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateRule {
    /// All of a step.
    Step,
    /// Each alone, as it comes.
    Each,
    /// Those of at least this many micro-batches. Once there are as many, others have a grace period to be part of the
    /// same update.
    Quorum(u64),
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
    /// Which gradients are applied together.
    pub update_rule: UpdateRule,
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
    /// Pieces that have been pushed and wait for others, with the worker.
    pushed: BTreeMap<Piece, WorkerId>,
    /// Pieces of updates that have been returned and not been applied yet, with the worker.
    in_updates: BTreeMap<Piece, WorkerId>,
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
            pushed: BTreeMap::new(),
            in_updates: BTreeMap::new(),
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
        let limit = self.last_step_of(worker);
        let Some(step) = self.first_free_step(limit) else {
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

    /// Records that a worker has pushed the gradient of a piece, which took `seconds` to compute. Returns whether the worker
    /// had the piece.
    #[must_use]
    pub fn push(&mut self, worker: WorkerId, piece: Piece, seconds: f64) -> bool {
        let member = self.workers.get_mut(&worker);
        let Some(member) = member.filter(|member| member.taken.contains(&piece)) else {
            return false;
        };
        member.taken.remove(&piece);
        member.observe(piece.num as f64 / seconds);
        self.pushed.insert(piece, worker);
        true
    }

    /// Whether there are enough gradients for an update, so that the grace period of the others begins.
    pub fn has_quorum(&self) -> bool {
        match self.options.update_rule {
            UpdateRule::Quorum(quorum) => num_microbatches(self.pushed.keys()) >= quorum.max(1),
            UpdateRule::Step | UpdateRule::Each => false,
        }
    }

    /// The next update to apply, if there is one.
    pub fn next_update(&mut self, is_grace_over: bool) -> Option<Update> {
        let pieces = self.ready_pieces(is_grace_over);
        for piece in &pieces {
            if let Some(worker) = self.pushed.remove(piece) {
                self.in_updates.insert(*piece, worker);
            }
        }
        (!pieces.is_empty()).then_some(Update { pieces })
    }

    /// Records that an update has been applied.
    pub fn apply(&mut self, update: &Update) {
        for piece in &update.pieces {
            if self.in_updates.remove(piece).is_some() {
                self.applied.insert(*piece);
            }
        }
        self.drop_complete_steps();
    }

    /// Whether all gradients have been applied.
    pub fn is_complete(&self) -> bool {
        self.oldest_step >= self.options.num_steps
    }

    /// The number of updates that gradients which have arrived will make, if each is applied alone; 0 if others decide when they
    /// are applied.
    pub fn num_pending_updates(&self) -> u64 {
        match self.options.update_rule {
            UpdateRule::Each => (self.pushed.len() + self.in_updates.len()) as u64,
            UpdateRule::Step | UpdateRule::Quorum(_) => 0,
        }
    }

    /// The number of micro-batches whose gradients have been applied.
    pub fn num_applied(&self) -> u64 {
        self.oldest_step * self.options.microbatches_per_step + num_microbatches(&self.applied)
    }

    /// What has been applied, for a checkpoint.
    pub fn progress(&self) -> Progress {
        Progress {
            step: self.oldest_step,
            applied: self.applied.iter().copied().collect(),
        }
    }

    /// The last step of which a worker may take a piece. A replica whose movement waits for an update goes on with the
    /// parameters that result from it, unless its step still has pieces that no worker computes.
    fn last_step_of(&self, worker: WorkerId) -> u64 {
        if !matches!(self.options.update_rule, UpdateRule::Quorum(_)) {
            return u64::MAX;
        }
        let waiting = self.pushed.iter().chain(&self.in_updates);
        let own = waiting.filter(|(_, by)| **by == worker);
        own.map(|(piece, _)| piece.step).min().unwrap_or(u64::MAX)
    }

    /// The first step with free pieces that the bound allows, at most `limit`, which becomes divisible if it was free as a
    /// whole.
    fn first_free_step(&mut self, limit: u64) -> Option<u64> {
        let found = self.free.iter().find(|(_, pieces)| !pieces.is_empty());
        let step = found.map_or(self.next_step, |(&step, _)| step);
        let is_allowed = self
            .options
            .max_staleness
            .is_none_or(|bound| step - self.oldest_step <= bound);
        if step >= self.options.num_steps || step > limit || !is_allowed {
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

    /// The pieces of the next update; none if it has to wait for more.
    fn ready_pieces(&self, is_grace_over: bool) -> Vec<Piece> {
        let is_ready = match self.options.update_rule {
            UpdateRule::Each => return self.pushed.keys().take(1).copied().collect(),
            UpdateRule::Step => self.has_all_of_oldest_step(),
            UpdateRule::Quorum(_) => {
                let is_computing = self.workers.values().any(|worker| !worker.taken.is_empty());
                let is_due = self.has_quorum() && (is_grace_over || !is_computing);
                is_due || self.has_all_of_oldest_step()
            }
        };
        let pushed = self.pushed.keys().filter(|_| is_ready);
        // An update ends one step at most.
        let mut num = 0;
        let fits = pushed.take_while(|piece| {
            num += piece.num;
            num <= self.options.microbatches_per_step
        });
        fits.copied().collect()
    }

    /// Whether the gradients of all pieces of the oldest step have arrived.
    fn has_all_of_oldest_step(&self) -> bool {
        let pieces = self.pushed.keys().chain(self.in_updates.keys());
        let pieces = pieces.chain(&self.applied);
        let of_oldest = pieces.filter(|piece| piece.step == self.oldest_step);
        num_microbatches(of_oldest) >= self.options.microbatches_per_step
    }

    fn drop_complete_steps(&mut self) {
        let total = self.options.microbatches_per_step;
        loop {
            let of_oldest = self
                .applied
                .iter()
                .filter(|piece| piece.step == self.oldest_step);
            if num_microbatches(of_oldest) < total {
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

fn num_microbatches<'a>(pieces: impl IntoIterator<Item = &'a Piece>) -> u64 {
    pieces.into_iter().map(|piece| piece.num).sum()
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
            update_rule: match max_staleness {
                Some(0) => UpdateRule::Step,
                _ => UpdateRule::Each,
            },
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
        assert!(queue.push(b, piece(0, 2, 2), 1.0));
        assert!(!queue.push(b, piece(0, 2, 2), 1.0), "only once");
        assert_eq!(queue.next_update(true), None);
        assert!(queue.push(a, piece(0, 0, 2), 1.0));
        let update = queue.next_update(false).unwrap();
        assert_eq!(update.pieces, [piece(0, 0, 2), piece(0, 2, 2)]);
        assert_eq!(queue.take(a), Take::Wait, "it has not been applied");
        assert_eq!(queue.progress(), START);
        queue.apply(&update);
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
        assert!(!queue.push(a, first, 1.0), "it has left");
        assert!(queue.push(b, second, 1.0));
        assert_eq!(queue.take(b), Take::Piece(first));
        assert!(queue.push(b, first, 1.0));
        assert_eq!(queue.next_update(false).unwrap().pieces, [first, second]);
    }

    #[test]
    fn a_step_that_was_asynchronous_before_a_restart_ends_synchronously() {
        let half = Progress {
            step: 0,
            applied: vec![piece(0, 0, 2)],
        };
        let mut queue = WorkQueue::new(options(Some(0)), &half);
        let worker = queue.join();
        assert_eq!(queue.take(worker), Take::Piece(piece(0, 2, 2)));
        assert!(queue.push(worker, piece(0, 2, 2), 1.0));
        let update = queue.next_update(false).unwrap();
        queue.apply(&update);
        assert_eq!(queue.progress().step, 1);
    }

    /// Replicas of a run with one piece each, of which `quorum` make an update.
    fn replicas(num: u64, quorum: u64, max_staleness: u64) -> WorkQueue {
        let options = WorkQueueOptions {
            microbatches_per_step: num,
            microbatches_per_piece: 1,
            update_rule: UpdateRule::Quorum(quorum),
            ..options(Some(max_staleness))
        };
        WorkQueue::new(options, &START)
    }

    #[test]
    fn an_update_does_not_wait_for_a_slow_replica_longer_than_the_grace_period() {
        let mut queue = replicas(3, 2, 1);
        let [a, b, slow] = [queue.join(), queue.join(), queue.join()];
        for (worker, first) in [(a, 0), (b, 1), (slow, 2)] {
            assert_eq!(queue.take(worker), Take::Piece(piece(0, first, 1)));
        }
        assert!(queue.push(a, piece(0, 0, 1), 1.0));
        assert!(!queue.has_quorum());
        assert_eq!(
            queue.take(a),
            Take::Wait,
            "its movement has not been applied"
        );
        assert!(queue.push(b, piece(0, 1, 1), 1.0));
        assert!(queue.has_quorum());
        assert_eq!(queue.next_update(false), None, "the grace period");
        let update = queue.next_update(true).unwrap();
        assert_eq!(update.pieces, [piece(0, 0, 1), piece(0, 1, 1)]);
        queue.apply(&update);
        // The late movement is part of the next update.
        assert_eq!(queue.take(a), Take::Piece(piece(1, 0, 1)));
        assert_eq!(queue.take(b), Take::Piece(piece(1, 1, 1)));
        assert!(queue.push(slow, piece(0, 2, 1), 9.0));
        assert!(queue.push(a, piece(1, 0, 1), 1.0));
        let update = queue.next_update(true).unwrap();
        assert_eq!(update.pieces, [piece(0, 2, 1), piece(1, 0, 1)]);
        queue.apply(&update);
        assert_eq!(queue.progress().step, 1);
    }

    #[test]
    fn a_replica_computes_what_others_have_left_behind() {
        let mut queue = replicas(2, 2, 1);
        let (a, lost) = (queue.join(), queue.join());
        assert_eq!(queue.take(a), Take::Piece(piece(0, 0, 1)));
        assert_eq!(queue.take(lost), Take::Piece(piece(0, 1, 1)));
        assert!(queue.push(a, piece(0, 0, 1), 1.0));
        assert_eq!(queue.take(a), Take::Wait);
        queue.leave(lost);
        assert_eq!(queue.take(a), Take::Piece(piece(0, 1, 1)));
        assert!(queue.push(a, piece(0, 1, 1), 1.0));
        assert_eq!(queue.next_update(false).unwrap().pieces.len(), 2);
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
            assert!(queue.push(worker, piece, seconds));
        }
        assert_eq!(queue.take(fast), Take::Piece(piece(1, 0, 6)));
        assert_eq!(queue.take(slow), Take::Piece(piece(1, 6, 2)));
    }

    /// Applies all updates, and counts the micro-batches in them.
    fn apply(queue: &mut WorkQueue, is_grace_over: bool, applied: &mut [[u64; 4]]) {
        while let Some(update) = queue.next_update(is_grace_over) {
            let num_steps = queue.num_applied() / 4;
            queue.apply(&update);
            assert!(queue.num_applied() / 4 <= num_steps + 1);
            for piece in &update.pieces {
                let own = piece.first as usize..(piece.first + piece.num) as usize;
                let step = &mut applied[piece.step as usize];
                step[own].iter_mut().for_each(|count| *count += 1);
            }
        }
    }

    /// Lets workers act in any order, lose connections and restart the servers; every micro-batch must be applied once.
    fn simulate(max_staleness: Option<u64>, quorum: Option<u64>, actions: &[(u8, u8)]) {
        let mut options = WorkQueueOptions {
            num_steps: 5,
            ..options(max_staleness)
        };
        if let Some(quorum) = quorum {
            options.microbatches_per_piece = 1;
            options.update_rule = UpdateRule::Quorum(quorum);
        }
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
                    assert!(queue.push(*id, piece, 1.0));
                    apply(&mut queue, false, &mut applied);
                }
                5 => apply(&mut queue, true, &mut applied),
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
            assert!(queue.push(last, piece, 1.0));
            apply(&mut queue, false, &mut applied);
        }
        assert_eq!(queue.take(last), Take::Done);
        assert_eq!(queue.num_applied(), 20);
        assert_eq!(applied, vec![[1; 4]; 5]);
    }

    proptest! {
        #[test]
        fn every_microbatch_is_applied_once(
            max_staleness in proptest::option::of(0u64..4),
            quorum in proptest::option::of(1u64..=4),
            actions in proptest::collection::vec((0u8..6, 0u8..4), 0..120),
        ) {
            simulate(max_staleness, quorum, &actions);
        }
    }
}
