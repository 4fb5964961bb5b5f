//! `trainyard top`: how the jobs of this machine are.

mod live;
mod screen;
mod view;

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use rustix::termios::tcgetwinsize;

use self::view::{JobView, jobs};
use crate::failure::Failure;

/// Columns where there is no terminal that has some.
const WIDTH: u16 = 110;

/// Show how the jobs of this machine are: every rank's step, loss, speed and memory, and the last faults
///
/// Jobs are those that `trainyard run` started here as the same user. Of a job on several machines the
/// ranks of all of them are shown. `q` leaves; arrows and pages scroll.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard top\n  \
    trainyard top llama7 --once\n  \
    trainyard top --json | jq '.[0].ranks[].step'")]
pub struct Top {
    /// Only jobs of this name (--rdzv-id)
    #[arg(value_name = "RUN")]
    run: Option<String>,
    /// Print one look and end
    #[arg(long)]
    once: bool,
    /// Print one look as JSON and end
    #[arg(long)]
    json: bool,
    /// Seconds between looks
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    interval: f64,
}

impl Top {
    /// Shows until it is left.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        if !self.once && !self.json && !io::stdout().is_terminal() {
            let message = "there is no terminal to show jobs in";
            return Err(Failure::usage(message).hint("use --once or --json"));
        }
        let interval = Duration::try_from_secs_f64(self.interval)
            .map_err(|error| Failure::usage(format!("--interval {}: {error}", self.interval)))?;
        let shown = match (self.json, self.once) {
            (true, _) => self.print_json(),
            (_, true) => self.print(),
            _ => live::show(interval, move || self.look()),
        };
        match shown {
            // Whoever reads may have read enough.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::new(error)),
            _ => Ok(ExitCode::SUCCESS),
        }
    }

    fn look(&self) -> Vec<JobView> {
        jobs(self.run.as_deref())
    }

    fn print_json(&self) -> io::Result<()> {
        let text = serde_json::to_string_pretty(&self.look()).map_err(io::Error::other)?;
        writeln!(io::stdout(), "{text}")
    }

    fn print(&self) -> io::Result<()> {
        let width = tcgetwinsize(io::stdout()).map_or(WIDTH, |size| size.ws_col);
        let painted = screen::paint(&self.look(), width.max(WIDTH / 2));
        write!(io::stdout(), "{}", screen::text(&painted))
    }
}
