//! What a run has done, as its last log line.

use std::time::{Duration, Instant};

use super::line::grouped;

/// Counts what a run does.
pub struct RunSummary {
    began: Instant,
    /// The steps that the job had taken before.
    first_step: u64,
    num_tokens: f64,
    loss: Option<f64>,
    /// The seconds in which the run took steps; the others are those of its start, of saves and of evaluations.
    step_seconds: f64,
    /// The seconds that the steps would take at the peak of the device; `None` if it is not known.
    peak_seconds: Option<f64>,
}

impl RunSummary {
    /// A run that starts after `first_step` steps.
    pub fn begin(first_step: u64) -> RunSummary {
        RunSummary {
            began: Instant::now(),
            first_step,
            num_tokens: 0.0,
            loss: None,
            step_seconds: 0.0,
            peak_seconds: Some(0.0),
        }
    }

    /// Adds the steps since the last report: the tokens of all ranks, their time in seconds, and their model FLOPs
    /// utilization.
    pub fn add(&mut self, num_tokens: f64, loss: f64, seconds: f64, mfu: Option<f64>) {
        self.num_tokens += num_tokens;
        self.loss = Some(loss);
        self.step_seconds += seconds;
        self.peak_seconds = self
            .peak_seconds
            .zip(mfu)
            .map(|(sum, mfu)| sum + mfu * seconds);
    }

    /// The last line of a run that ends after `step` of `num_steps` steps, with the place of its last checkpoint.
    pub fn line(&self, step: u64, num_steps: u64, checkpoint: Option<&str>) -> String {
        self.line_after(self.began.elapsed(), (step, num_steps), checkpoint)
    }

    fn line_after(
        &self,
        elapsed: Duration,
        (step, num_steps): (u64, u64),
        checkpoint: Option<&str>,
    ) -> String {
        let seconds = elapsed.as_secs_f64();
        let mut line = match step - self.first_step.min(step) {
            0 => format!("took no step: {step} of {num_steps} were taken before"),
            _ => format!(
                "took steps {} to {step} of {num_steps} in {seconds:.1} s",
                self.first_step + 1
            ),
        };
        if let Some(loss) = self.loss {
            let speed = grouped(self.num_tokens / seconds.max(f64::MIN_POSITIVE), 0);
            line += &format!(", {speed} tokens/s");
            // Of the time of the steps, as in their lines; goodput says how much of all time that is.
            if let Some(peak_seconds) = self.peak_seconds {
                line += &format!(", MFU {:.1} %", 100.0 * peak_seconds / self.step_seconds);
            }
            let goodput = (self.step_seconds / seconds).min(1.0);
            line += &format!(", goodput {:.0} %; loss {loss:.5}", 100.0 * goodput);
        }
        line + &match checkpoint {
            None => "; no checkpoint was saved (checkpoint.enable)".to_owned(),
            Some(place) if step < num_steps => {
                format!("; checkpoint {place}: the same command goes on from there")
            }
            Some(place) => format!(
                "; checkpoint {place}: the same command with --training.steps {} goes on from there",
                2 * num_steps
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_says_what_it_did_and_how_to_go_on() {
        let mut run = RunSummary::begin(10);
        let line =
            |run: &RunSummary, steps, place| run.line_after(Duration::from_secs(2), steps, place);
        assert_eq!(
            line(&run, (10, 10), None),
            "took no step: 10 of 10 were taken before; no checkpoint was saved (checkpoint.enable)"
        );
        run.add(1500.0, 3.5, 0.5, Some(0.2));
        run.add(1000.0, 2.25, 1.0, Some(0.35));
        assert_eq!(
            line(&run, (20, 20), Some("out/step-20")),
            "took steps 11 to 20 of 20 in 2.0 s, 1,250 tokens/s, MFU 30.0 %, goodput 75 %; loss 2.25000; checkpoint \
             out/step-20: the same command with --training.steps 40 goes on from there"
        );
        run.add(1000.0, 2.25, 0.1, None);
        assert!(line(&run, (20, 20), None).contains("tokens/s, goodput 80 %; "));
        let preempted = line(&run, (15, 20), Some("out/step-15"));
        assert!(preempted.ends_with("out/step-15: the same command goes on from there"));
    }
}
