//! `trainyard top`: shows the state of the jobs on this node.

mod live;
mod screen;
mod view;

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use rustix::termios::tcgetwinsize;

use self::view::{Snapshot, snapshot};
use crate::failure::Failure;

/// Show the jobs on this node: step, loss, throughput and memory of every rank, and the last faults
///
/// Shows the jobs that `trainyard run` started on this node as the same user. For elastic runs it shows the ranks of
/// all nodes. Press `q` to quit, arrow and page keys to scroll.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard top\n  \
    trainyard top llama7 --once\n  \
    trainyard top --json | jq '.[0].ranks[].step'")]
pub struct Top {
    /// Show only the job with this name (--rdzv-id)
    #[arg(value_name = "RUN")]
    run: Option<String>,
    /// Print one snapshot and exit
    #[arg(long)]
    once: bool,
    /// Print one snapshot as JSON and exit
    #[arg(long)]
    json: bool,
    /// Seconds between updates
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    interval: f64,
}

/// A narrower terminal wraps lines.
const MIN_WIDTH: u16 = 55;

impl Top {
    /// Shows the jobs until the user quits.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        if !self.once && !self.json && !io::stdout().is_terminal() {
            let message = "stdout is not a terminal";
            return Err(Failure::usage(message).hint("use --once or --json"));
        }
        let interval = Duration::try_from_secs_f64(self.interval)
            .map_err(|error| Failure::usage(format!("--interval {}: {error}", self.interval)))?;
        let shown = match (self.json, self.once) {
            (true, _) => self.print_json(),
            (_, true) => self.print(),
            _ => live::show(interval, move || self.snapshot()),
        };
        match shown {
            // The reader of the pipe may have closed it (`| head`).
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::new(error)),
            _ => Ok(ExitCode::SUCCESS),
        }
    }

    fn snapshot(&self) -> Snapshot {
        snapshot(self.run.as_deref())
    }

    fn print_json(&self) -> io::Result<()> {
        let text = serde_json::to_string_pretty(&self.snapshot().jobs).map_err(io::Error::other)?;
        writeln!(io::stdout(), "{text}")
    }

    fn print(&self) -> io::Result<()> {
        let snapshot = self.snapshot();
        // Without a terminal, nothing is cut off.
        let width = tcgetwinsize(io::stdout()).map(|size| size.ws_col);
        let width = width.unwrap_or_else(|_| screen::width(&snapshot));
        let painted = screen::paint(&snapshot, width.max(MIN_WIDTH));
        write!(io::stdout(), "{}", screen::text(&painted))
    }
}
