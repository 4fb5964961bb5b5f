//! One progress bar for a job, on terminals only, from the heartbeats of its ranks.

use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressStyle};
use trainyard_heartbeat::{Heartbeat, RankStatus};

use crate::{Console, Job};

const TEMPLATE: &str = "{bar:30} {pos}/{len} steps  {per_sec}  {eta} left{msg}";

/// The progress bar of a job, which may be hidden. Clones are the same bar.
#[derive(Clone, Debug)]
pub(crate) struct JobProgress(Option<ProgressBar>);

impl JobProgress {
    /// A bar that appears with the first heartbeat which asks for one; none if stderr is not a terminal.
    pub(crate) fn new(job: &Job) -> JobProgress {
        if job.output.console != Console::Prefixed || !io::stderr().is_terminal() {
            return JobProgress(None);
        }
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style);
        }
        JobProgress(Some(bar))
    }

    /// Shows how far the ranks are.
    pub(crate) fn update(&self, statuses: &[RankStatus]) {
        let Some(bar) = &self.0 else { return };
        let heartbeats: Vec<&Heartbeat> = statuses.iter().map(|status| &status.heartbeat).collect();
        let Some(position) = Position::of(&heartbeats) else {
            return;
        };
        if bar.length() != Some(position.num_steps) {
            bar.set_length(position.num_steps);
            bar.set_position(position.step);
            // The speed is that of steps from here on, not from step 0 on.
            bar.reset_eta();
        }
        bar.set_message(position.message);
        bar.set_position(position.step);
    }

    /// Hides the bar while `print` runs.
    pub(crate) fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        match self.shown() {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        if let Some(bar) = self.shown() {
            bar.finish_and_clear();
        }
    }

    /// The bar, once it has appeared: to suspend it would draw it.
    fn shown(&self) -> Option<&ProgressBar> {
        self.0.as_ref().filter(|bar| bar.length() != Some(0))
    }
}

/// How far a job is.
#[derive(Debug, PartialEq, Eq)]
struct Position {
    /// The steps that all ranks have taken.
    step: u64,
    num_steps: u64,
    message: String,
}

impl Position {
    /// The position of ranks; `None` before they have all begun, or if they do not ask for a bar.
    fn of(heartbeats: &[&Heartbeat]) -> Option<Position> {
        let first = heartbeats.first().filter(|first| first.shows_progress)?;
        let taken: Option<Vec<u64>> = heartbeats.iter().map(|each| each.steps_taken()).collect();
        let loss = heartbeats.iter().find_map(|heartbeat| heartbeat.loss);
        Some(Position {
            step: taken?.into_iter().min()?,
            num_steps: first.num_steps,
            message: loss.map_or_else(String::new, |loss| format!("  loss {loss:.4}")),
        })
    }
}

#[cfg(test)]
mod tests {
    use trainyard_heartbeat::Stage;

    use super::*;

    fn heartbeat(stage: Stage, step: u64) -> Heartbeat {
        Heartbeat {
            stage,
            step,
            num_steps: 9,
            shows_progress: true,
            ..Heartbeat::default()
        }
    }

    #[test]
    fn a_job_is_where_its_last_rank_is() {
        let (fast, slow) = (heartbeat(Stage::Between, 5), heartbeat(Stage::Stepping, 5));
        let found = Position::of(&[&fast, &slow]).map(|position| position.step);
        assert_eq!(found, Some(4));
    }

    #[test]
    fn there_is_no_bar_before_all_ranks_have_begun_or_if_it_is_off() {
        let (begun, starting) = (heartbeat(Stage::Stepping, 1), heartbeat(Stage::Starting, 0));
        assert_eq!(Position::of(&[&begun, &starting]), None);
        let quiet = Heartbeat {
            shows_progress: false,
            ..begun
        };
        assert_eq!(Position::of(&[&quiet]), None);
        assert_eq!(Position::of(&[]), None);
    }
}
