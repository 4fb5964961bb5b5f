//! The metrics that are exposed, by the conventions of OpenMetrics: base units, and names that end in them.

use std::time::Instant;

use trainyard_heartbeat::Heartbeat;

use crate::family::{Family, Kind};
use crate::job_metrics::JobMetrics;
use crate::restart_cause::RestartCause;

/// The program that exposes the metrics.
#[derive(Clone, Debug)]
pub struct Build {
    /// The version of Trainyard.
    pub version: String,
    /// The commit that it was built from.
    pub commit: String,
}

/// All families of a job. The number of series does not depend on the number of ranks, unless `per_rank`.
pub fn families(metrics: &JobMetrics, build: &Build, per_rank: bool, now: Instant) -> Vec<Family> {
    let mut all = vec![build_info(build)];
    all.extend(progress(metrics));
    all.extend(speed(metrics));
    all.extend(reliability(metrics, now));
    all.extend(world(metrics));
    if per_rank {
        all.extend(ranks(metrics));
    }
    all
}

fn gauge(name: &'static str, unit: &'static str, help: &'static str) -> Family {
    Family::new(Kind::Gauge, name, unit, help)
}

fn counter(name: &'static str, unit: &'static str, help: &'static str) -> Family {
    Family::new(Kind::Counter, name, unit, help)
}

fn build_info(build: &Build) -> Family {
    let labels = vec![
        ("version", build.version.clone()),
        ("commit", build.commit.clone()),
    ];
    Family::new(
        Kind::Info,
        "trainyard_build",
        "",
        "The launcher that serves these metrics.",
    )
    .with_all([(labels, 1.0)])
}

/// How far training is. Only the node of rank 0 knows it.
fn progress(metrics: &JobMetrics) -> Vec<Family> {
    let lead = metrics.lead();
    let of_lead = |value: fn(&Heartbeat) -> Option<f64>| lead.and_then(value);
    let loss = |heartbeat: &Heartbeat| {
        let invalid = heartbeat.metrics.is_loss_invalid.then_some(f64::NAN);
        invalid.or(heartbeat.loss)
    };
    let step = lead.and_then(|_| metrics.step());
    let num_steps =
        |heartbeat: &Heartbeat| Some(heartbeat.num_steps as f64).filter(|num| *num > 0.0);
    let last_step = lead.and_then(|_| metrics.last_step_seconds());
    vec![
        gauge(
            "trainyard_step",
            "",
            "The last step that all ranks have completed.",
        )
        .with(step.map(|step| step as f64)),
        gauge("trainyard_num_steps", "", "The last step of the job.").with(of_lead(num_steps)),
        gauge(
            "trainyard_loss",
            "",
            "The last reported loss; NaN if it was not a finite number.",
        )
        .with(of_lead(loss)),
        gauge(
            "trainyard_grad_norm",
            "",
            "The norm of the gradients in the last reported step.",
        )
        .with(of_lead(|heartbeat| heartbeat.metrics.grad_norm)),
        gauge(
            "trainyard_learning_rate",
            "",
            "The learning rate of the last reported step.",
        )
        .with(of_lead(|heartbeat| heartbeat.metrics.learning_rate)),
        gauge(
            "trainyard_last_step_timestamp_seconds",
            "seconds",
            "When all ranks last completed a step, in seconds since 1970.",
        )
        .with(last_step),
    ]
}

/// How fast training is, and where its time and memory go.
fn speed(metrics: &JobMetrics) -> Vec<Family> {
    let lead = metrics.lead();
    let step_times = Family::new(
        Kind::Histogram,
        "trainyard_step_duration_seconds",
        "seconds",
        "The durations of the steps of rank 0, those after restarts included.",
    );
    let sent = metrics
        .sent_bytes()
        .into_iter()
        .map(|((purpose, group), bytes)| {
            (vec![("purpose", purpose), ("group", group)], bytes as f64)
        });
    let waits = |heartbeat: &Heartbeat| heartbeat.busy_fraction.map(|busy| 1.0 - busy);
    vec![
        gauge(
            "trainyard_tokens_per_second",
            "",
            "The tokens that all known ranks together train on in a second.",
        )
        .with(metrics.tokens_per_second()),
        gauge(
            "trainyard_mfu_ratio",
            "ratio",
            "Model FLOPs utilization of rank 0, from 0 to 1.",
        )
        .with(lead.and_then(|heartbeat| heartbeat.metrics.mfu)),
        match lead {
            Some(_) => step_times.with_histogram(metrics.step_times()),
            None => step_times,
        },
        gauge(
            "trainyard_data_wait_ratio",
            "ratio",
            "The share of step time in which rank 0 waits for data.",
        )
        .with(lead.and_then(|heartbeat| heartbeat.metrics.data_wait_fraction)),
        gauge(
            "trainyard_collective_wait_ratio",
            "ratio",
            "The share of step time in which rank 0 waits for other ranks.",
        )
        .with(lead.and_then(waits)),
        counter(
            "trainyard_sent_bytes",
            "bytes",
            "The bytes that the known ranks have sent in collectives, by purpose and group.",
        )
        .with_all(sent),
        gauge(
            "trainyard_memory_peak_bytes",
            "bytes",
            "The most memory that a known rank has used on its device.",
        )
        .with(metrics.peak_bytes().map(|bytes| bytes as f64)),
    ]
}

/// Whether training survives, and what interruptions cost.
fn reliability(metrics: &JobMetrics, now: Instant) -> Vec<Family> {
    let is_lead = metrics.lead().is_some();
    let (useful, elapsed) = (
        metrics.goodput().useful_seconds(),
        metrics.elapsed(now).as_secs_f64(),
    );
    let restarts = RestartCause::ALL.map(|cause| {
        let count = metrics.restarts.get(&cause).copied().unwrap_or_default();
        (vec![("cause", cause.label().to_owned())], count as f64)
    });
    vec![
        counter(
            "trainyard_restarts",
            "",
            "How often this node's ranks were started again, by cause.",
        )
        .with_all(restarts),
        counter(
            "trainyard_lost_steps",
            "",
            "Completed steps that the job had to take again.",
        )
        .with(is_lead.then_some(metrics.goodput().lost_steps() as f64)),
        counter(
            "trainyard_useful_seconds",
            "seconds",
            "The time of steps that the job did not have to take again.",
        )
        .with(is_lead.then_some(useful)),
        counter(
            "trainyard_run_seconds",
            "seconds",
            "The time since the launcher started.",
        )
        .with(Some(elapsed)),
        gauge(
            "trainyard_goodput_ratio",
            "ratio",
            "Useful time as a share of all time since the start.",
        )
        .with(is_lead.then_some(useful / elapsed.max(f64::MIN_POSITIVE))),
        gauge(
            "trainyard_stragglers",
            "",
            "Ranks that are slow, without hanging.",
        )
        .with(Some(metrics.slow.len() as f64)),
        gauge(
            "trainyard_hung_ranks",
            "",
            "Ranks of this node that were killed because they hung.",
        )
        .with(Some(metrics.num_hung as f64)),
        gauge(
            "trainyard_checkpoint_pause_seconds",
            "seconds",
            "How long training paused for the last checkpoint.",
        )
        .with(metrics.last_save.map(|save| save.pause_seconds)),
        gauge(
            "trainyard_checkpoint_step",
            "",
            "The step of the last checkpoint.",
        )
        .with(metrics.last_save.map(|save| save.step as f64)),
        gauge(
            "trainyard_checkpoint_timestamp_seconds",
            "seconds",
            "When the last checkpoint was made, in seconds since 1970.",
        )
        .with(metrics.last_save.map(|save| save.unix_seconds)),
    ]
}

/// The ranks that belong to the job at present.
fn world(metrics: &JobMetrics) -> Vec<Family> {
    const STATE: &str = "trainyard_rendezvous_state";
    let states = [
        ("joining", !metrics.is_running),
        ("running", metrics.is_running),
    ];
    let states =
        states.map(|(state, holds)| (vec![(STATE, state.to_owned())], f64::from(u8::from(holds))));
    let epoch = metrics.world.and_then(|world| world.epoch);
    vec![
        gauge(
            "trainyard_world_size",
            "",
            "The number of ranks on all nodes.",
        )
        .with(metrics.world.map(|world| world.size as f64)),
        gauge(
            "trainyard_rendezvous_epoch",
            "",
            "The number of the world in an elastic run.",
        )
        .with(epoch.map(|epoch| epoch as f64)),
        Family::new(
            Kind::StateSet,
            STATE,
            "",
            "Whether this node's ranks run, or wait to be started.",
        )
        .with_all(states),
    ]
}

/// Series of each known rank.
fn ranks(metrics: &JobMetrics) -> Vec<Family> {
    let of_each = |value: fn(&Heartbeat) -> Option<f64>| {
        let ranks = metrics.ranks.iter();
        let series = ranks.filter_map(move |(rank, status)| {
            Some((vec![("rank", rank.to_string())], value(&status.heartbeat)?))
        });
        series.collect::<Vec<_>>()
    };
    vec![
        gauge(
            "trainyard_rank_step",
            "",
            "The last step that the rank has completed.",
        )
        .with_all(of_each(|heartbeat| Some(heartbeat.steps_taken()? as f64))),
        gauge(
            "trainyard_rank_busy_ratio",
            "ratio",
            "The share of step time in which the rank does not wait for others.",
        )
        .with_all(of_each(|heartbeat| heartbeat.busy_fraction)),
        gauge(
            "trainyard_rank_tokens_per_second",
            "",
            "The tokens per second of the rank.",
        )
        .with_all(of_each(|heartbeat| heartbeat.tokens_per_second)),
        gauge(
            "trainyard_rank_memory_peak_bytes",
            "bytes",
            "The most memory that the rank has used.",
        )
        .with_all(of_each(|heartbeat| Some(heartbeat.peak_bytes? as f64))),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use trainyard_launcher::Job;

    use super::*;
    use crate::job_metrics::tests::{observe, status};

    fn of(metrics: &JobMetrics, per_rank: bool) -> Vec<Family> {
        let build = Build {
            version: "1".to_owned(),
            commit: "c".to_owned(),
        };
        families(metrics, &build, per_rank, Instant::now())
    }

    fn num_series(families: &[Family]) -> usize {
        families.iter().map(|family| family.samples.len()).sum()
    }

    fn running(num_ranks: usize) -> JobMetrics {
        let mut metrics = JobMetrics::new(Instant::now());
        metrics.start(&Job::new("train", num_ranks));
        let ranks: Vec<_> = (0..num_ranks).map(|rank| status(rank, 10, 10)).collect();
        observe(&mut metrics, &ranks, 100);
        metrics
    }

    #[test]
    fn names_are_unique_and_the_number_of_series_does_not_grow_with_the_ranks() {
        let few = of(&running(2), false);
        let names: BTreeSet<&str> = few.iter().map(|family| family.name).collect();
        assert_eq!(names.len(), few.len());
        assert_eq!(num_series(&of(&running(100), false)), num_series(&few));
        assert_eq!(num_series(&of(&running(100), true)), num_series(&few) + 300);
    }

    #[test]
    fn another_node_than_that_of_rank_0_does_not_speak_for_the_job() {
        let mut metrics = JobMetrics::new(Instant::now());
        metrics.start(&Job::new("train", 1));
        observe(&mut metrics, &[status(3, 10, 10)], 100);
        let has = |name: &str| {
            let all = of(&metrics, false);
            all.iter()
                .any(|family| family.name == name && !family.samples.is_empty())
        };
        assert!(!has("trainyard_step") && !has("trainyard_goodput_ratio"));
        assert!(has("trainyard_restarts") && has("trainyard_memory_peak_bytes"));
    }
}
