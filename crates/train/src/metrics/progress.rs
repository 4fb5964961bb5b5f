//! A progress bar, on terminals only, which does not interfere with log lines.

use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressStyle};

const TEMPLATE: &str = "{bar:30} {pos}/{len} steps  {per_sec}  {eta} left";

/// A progress bar, which may be hidden.
pub struct Progress(Option<ProgressBar>);

impl Progress {
    /// A bar at `done` of `steps`; hidden if stderr is not a terminal.
    pub fn on_terminal(steps: u64, done: u64) -> Progress {
        if !io::stderr().is_terminal() {
            return Progress::hidden();
        }
        let bar = ProgressBar::new(steps).with_position(done);
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style);
        }
        bar.reset_eta();
        Progress(Some(bar))
    }

    /// A hidden bar.
    pub fn hidden() -> Progress {
        Progress(None)
    }

    /// Moves to `step`.
    pub fn advance(&self, step: u64) {
        if let Some(bar) = &self.0 {
            bar.set_position(step);
        }
    }

    /// Hides the bar while `print` runs.
    pub fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        match &self.0 {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
