//! Goodput: the share of a job's time that went into steps which it did not have to take again.

/// Follows one rank through the restarts of its job.
#[derive(Clone, Copy, Debug, Default)]
pub struct Goodput {
    useful_seconds: f64,
    lost_steps: u64,
    /// The number of steps that the job has completed at its best.
    max_steps: u64,
    /// Where the rank was when it was last seen.
    last: Option<Position>,
    /// Whether the next position is one of a new process.
    is_new: bool,
    /// Whether the job ran before it was followed.
    is_attached: bool,
}

/// How far a rank is.
#[derive(Clone, Copy, Debug)]
pub struct Position {
    /// The steps that the job has completed, including those before it was resumed.
    pub steps: u64,
    /// The steps that the rank has taken since its process began.
    pub steps_of_process: u64,
    /// The time that these took.
    pub seconds_of_process: f64,
}

impl Goodput {
    /// Follows a job that runs already: only what it does from now on counts.
    pub fn attached() -> Goodput {
        Goodput {
            is_attached: true,
            ..Goodput::default()
        }
    }

    /// The rank's process has ended, or another one has begun.
    pub fn restart(&mut self) {
        self.is_new = true;
    }

    /// The rank was seen at `position`. Time counts as useful if no earlier world has taken the same step.
    pub fn observe(&mut self, position: Position) {
        let (before, last) = match self.last {
            Some(last) if !self.is_new => (last.steps, last),
            Some(last) => (last.steps, resumed(position)),
            None if self.is_attached => {
                self.max_steps = position.steps;
                (position.steps, position)
            }
            None => {
                // Steps before the first process are those of another job.
                self.max_steps = resumed(position).steps;
                (self.max_steps, resumed(position))
            }
        };
        // A process goes back when it begins, or by itself.
        let back_at = position.steps.min(last.steps);
        self.lost_steps += before.saturating_sub(back_at);
        self.is_new = false;
        let new = position
            .steps
            .saturating_sub(last.steps.max(self.max_steps));
        let taken = position.steps.saturating_sub(last.steps);
        if taken > 0 {
            let seconds = position.seconds_of_process - last.seconds_of_process;
            self.useful_seconds += seconds.max(0.0) * new as f64 / taken as f64;
        }
        self.max_steps = self.max_steps.max(position.steps);
        self.last = Some(position);
    }

    /// The time of steps that the job did not have to take again.
    pub fn useful_seconds(&self) -> f64 {
        self.useful_seconds
    }

    /// The number of completed steps that the job had to take again.
    pub fn lost_steps(&self) -> u64 {
        self.lost_steps
    }
}

/// Where the process began that is now at `position`.
fn resumed(position: Position) -> Position {
    Position {
        steps: position.steps.saturating_sub(position.steps_of_process),
        steps_of_process: 0,
        seconds_of_process: 0.0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(steps: u64, steps_of_process: u64) -> Position {
        Position {
            steps,
            steps_of_process,
            seconds_of_process: steps_of_process as f64,
        }
    }

    #[test]
    fn of_a_job_that_ran_before_only_later_steps_count() {
        let position = |steps: u64| Position {
            steps,
            steps_of_process: steps,
            seconds_of_process: 2.0 * steps as f64,
        };
        let mut goodput = Goodput::attached();
        goodput.observe(position(100));
        assert_eq!(goodput.useful_seconds(), 0.0);
        goodput.observe(position(110));
        assert_eq!((goodput.useful_seconds(), goodput.lost_steps()), (20.0, 0));
    }

    #[test]
    fn repeated_steps_are_lost_and_not_useful() {
        let mut goodput = Goodput::default();
        goodput.observe(at(103, 3));
        goodput.observe(at(110, 10));
        assert_eq!((goodput.useful_seconds(), goodput.lost_steps()), (10.0, 0));
        goodput.restart();
        // Resumed after step 104: six steps are repeated.
        goodput.observe(at(108, 4));
        assert_eq!((goodput.useful_seconds(), goodput.lost_steps()), (10.0, 6));
        goodput.observe(at(120, 16));
        assert_eq!((goodput.useful_seconds(), goodput.lost_steps()), (20.0, 6));
        // Goes back in the same process.
        goodput.observe(at(115, 17));
        assert_eq!((goodput.useful_seconds(), goodput.lost_steps()), (20.0, 11));
    }

    proptest! {
        /// However the job is interrupted and observed: every step is useful once, and all others are lost.
        #[test]
        fn every_step_is_useful_once(worlds in prop::collection::vec((1u64..30, 0u64..30, 1u64..7), 1..8)) {
            let mut goodput = Goodput::default();
            let (mut end, mut best, mut num_taken) = (0u64, 0, 0);
            for (num, lost, every) in worlds {
                let first = end.saturating_sub(lost);
                goodput.restart();
                for step in 1..=num {
                    if step % every == 0 || step == num {
                        goodput.observe(at(first + step, step));
                    }
                }
                end = first + num;
                (best, num_taken) = (end.max(best), num_taken + num);
            }
            // The last world may not have come as far as an earlier one.
            prop_assert_eq!(goodput.lost_steps() + end, num_taken);
            prop_assert!((goodput.useful_seconds() - best as f64).abs() < 1e-6);
        }
    }
}
