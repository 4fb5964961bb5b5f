//! Measured pipeline steps, compared with the prediction of their schedule.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

use serde::Serialize;
use trainyard_schedule::{Action, Costs, ScheduleError, Span, Timeline, simulate, to_svg};
use trainyard_trace::{Events, SpanKind, counted, read_all};

use crate::failure::Failure;

/// The comparison.
#[derive(Debug, Serialize)]
struct Report {
    num_steps: usize,
    measured: Figures,
    predicted: Figures,
    /// Measured divided by predicted bubble: the median over the steps. The figures are those of the median step.
    bubble_ratio: f64,
}

/// Times in milliseconds, and micro-batches in flight.
#[derive(Debug, Serialize)]
struct Figures {
    step: f64,
    bubble: f64,
    waits: Vec<f64>,
    in_flight: Vec<usize>,
}

impl Figures {
    fn of(timeline: &Timeline) -> Figures {
        let ranks = 0..timeline.ranks.len();
        Figures {
            step: timeline.end(),
            bubble: timeline.bubble(),
            waits: ranks.map(|rank| timeline.idle_time(rank)).collect(),
            in_flight: timeline.max_in_flight(),
        }
    }
}

/// Reads the traces, predicts the steps, and prints or draws both.
pub(super) fn execute(folder: &Path, svg: Option<&Path>, json: bool) -> Result<ExitCode, Failure> {
    let no_trace = "traces are written with `--profiling.enable_profiling true`";
    let ranks = read_all(&[folder.to_owned()]).map_err(|e| Failure::new(e).hint(no_trace))?;
    let mut steps = timelines(&ranks)
        .into_iter()
        .map(|measured| Ok((predicted(&measured)?, measured)))
        .collect::<Result<Vec<_>, ScheduleError>>()
        .map_err(Failure::new)?;
    let ratio =
        |(predicted, measured): &(Timeline, Timeline)| measured.bubble() / predicted.bubble();
    steps.sort_by(|a, b| ratio(a).total_cmp(&ratio(b)));
    let Some(step) = steps.get(steps.len() / 2) else {
        return Err(Failure::new("these traces contain no complete pipeline step").hint(no_trace));
    };
    let (predicted, measured) = step;
    let report = Report {
        num_steps: steps.len(),
        bubble_ratio: ratio(step),
        measured: Figures::of(measured),
        predicted: Figures::of(predicted),
    };
    if let Some(path) = svg {
        let panels = [
            ("measured, in milliseconds", measured),
            ("predicted from the measured costs of stages", predicted),
        ];
        std::fs::write(path, to_svg(&panels))
            .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
    }
    if json {
        println!("{}", serde_json::json!(report))
    } else {
        print(&report)
    }
    Ok(ExitCode::SUCCESS)
}

/// The same schedule with the median time of every stage.
fn predicted(measured: &Timeline) -> Result<Timeline, ScheduleError> {
    let costs = Costs::measured(std::slice::from_ref(measured));
    simulate(&measured.schedule()?, &costs)
}

fn print(report: &Report) {
    let Report {
        measured,
        predicted,
        ..
    } = report;
    println!(
        "{}; the step with the median ratio of measured to predicted bubble, in milliseconds\n",
        counted(report.num_steps as u64, "step")
    );
    println!("               measured  predicted");
    println!(
        "step         {:>10.2} {:>10.2}",
        measured.step, predicted.step
    );
    println!(
        "bubble       {:>10.2} {:>10.2}",
        measured.bubble, predicted.bubble
    );
    for rank in 0..measured.waits.len() {
        let waits = [measured, predicted].map(|figures| figures.waits[rank]);
        println!("rank {rank} waits {:>10.2} {:>10.2}", waits[0], waits[1]);
    }
    println!(
        "in flight    {:>10?} {:>10?}",
        measured.in_flight, predicted.in_flight
    );
}

/// The pipeline steps that every rank recorded completely.
fn timelines(ranks: &[Events]) -> Vec<Timeline> {
    let mut steps: BTreeMap<&str, Vec<Vec<Span>>> = BTreeMap::new();
    for events in ranks {
        for step in events.spans.iter().filter(|s| s.kind == SpanKind::Step) {
            let within = events.spans.iter().filter(|span| {
                span.started_ns >= step.started_ns && span.ended_ns <= step.ended_ns
            });
            let mut spans: Vec<Span> = within.filter_map(task_span).collect();
            spans.sort_by(|a, b| a.start.total_cmp(&b.start));
            steps.entry(&step.name).or_default().push(spans);
        }
    }
    let is_whole = |step: &Vec<Vec<Span>>| {
        step.len() == ranks.len() && step.iter().all(|spans| !spans.is_empty())
    };
    let whole = steps.into_values().filter(is_whole);
    whole.map(|ranks| from_zero(Timeline { ranks })).collect()
}

/// The span of an action, in milliseconds.
fn task_span(span: &trainyard_trace::Span) -> Option<Span> {
    let (_, action) = span.name.split_once(' ')?;
    Some(Span {
        action: action.parse::<Action>().ok()?,
        start: span.started_ns as f64 / 1e6,
        end: span.ended_ns as f64 / 1e6,
    })
}

/// The same with the first action at time zero.
fn from_zero(mut timeline: Timeline) -> Timeline {
    let spans = timeline.ranks.iter().flatten();
    let first = spans.map(|span| span.start).fold(f64::INFINITY, f64::min);
    for span in timeline.ranks.iter_mut().flatten() {
        span.start -= first;
        span.end -= first;
    }
    timeline
}
