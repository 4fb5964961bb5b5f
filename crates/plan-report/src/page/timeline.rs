//! The simulated timeline of every pipeline rank.
//!
//! All boxes of one rank and color form one SVG path, which keeps thousands of boxes small.

use std::fmt::Write;

use trainyard_schedule::{Action, ComputeType, Span};

use super::{legend, seconds, section};
use trainyard_plan::{Plan, PlanRequest, timeline};
use trainyard_trace::counted;

const WIDTH: f64 = 1000.0;
const LEFT: f64 = 62.0;
const ROW: f64 = 18.0;
/// With more ranks than this, only every n-th rank is shown.
const MAX_RANKS: usize = 16;

const COLORS: [(&str, &str, ComputeType); 4] = [
    ("c1", "forward", ComputeType::Forward),
    ("c7", "backward", ComputeType::Backward),
    ("c2", "backward input", ComputeType::BackwardInput),
    ("c4", "backward weight", ComputeType::BackwardWeight),
];

pub(super) fn draw(page: &mut String, request: &PlanRequest, plan: &Plan) {
    let strategy = &plan.strategy;
    let timeline = timeline(
        &request.shape,
        strategy,
        &request.cluster,
        &request.calibration,
    );
    let Ok(timeline) = timeline else { return };
    let end = timeline.end().max(f64::MIN_POSITIVE);
    let every = strategy.degrees.pp.div_ceil(MAX_RANKS);
    let shown: Vec<usize> = (0..timeline.ranks.len()).step_by(every).collect();
    let mut what = format!(
        "{}: {} through {} stages on {} ranks; gaps are the pipeline bubble.",
        strategy.pipeline,
        counted(strategy.num_microbatches() as u64, "micro-batch"),
        strategy.num_stages(),
        strategy.degrees.pp
    );
    if every > 1 {
        let _ = write!(what, " One of every {every} ranks is shown.");
    }
    section(page, "Pipeline schedule", &what);
    let height = ROW * shown.len() as f64 + 24.0;
    let _ = writeln!(
        page,
        "<div class=\"panel\"><svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"pipeline timeline\">"
    );
    for (row, &rank) in shown.iter().enumerate() {
        let y = ROW * row as f64;
        let _ = writeln!(
            page,
            "<text x=\"0\" y=\"{:.1}\">rank {rank}</text>",
            y + 13.0
        );
        for (color, _, work) in COLORS {
            let path = path(&timeline.ranks[rank], work, y, (WIDTH - LEFT) / end);
            if !path.is_empty() {
                let _ = writeln!(page, "<path fill=\"var(--{color})\" d=\"{path}\"/>");
            }
        }
    }
    let y = height - 6.0;
    let _ = writeln!(
        page,
        "<text x=\"{LEFT}\" y=\"{y}\">0</text><text x=\"{WIDTH}\" y=\"{y}\" text-anchor=\"end\">{}</text></svg>",
        seconds(end)
    );
    let used = COLORS.iter().filter(|(_, _, work)| {
        let spans = timeline.ranks.iter().flatten();
        spans.flat_map(works).any(|found| found == *work)
    });
    let used: Vec<(&str, &str)> = used.map(|(color, name, _)| (*color, *name)).collect();
    legend(page, &used);
    page.push_str("</div>\n");
}

fn works(span: &Span) -> Vec<ComputeType> {
    match span.action {
        Action::Single(task) => vec![task.compute_type],
        Action::Overlapped(first, second) => vec![first.compute_type, second.compute_type],
    }
}

/// The boxes of one kind of work. Two at once share the height of the row.
fn path(spans: &[Span], work: ComputeType, y: f64, scale: f64) -> String {
    let mut path = String::new();
    for span in spans {
        let works = works(span);
        let height = (ROW - 3.0) / works.len() as f64;
        for (index, _) in works
            .iter()
            .enumerate()
            .filter(|(_, found)| **found == work)
        {
            let width = (span.end - span.start) * scale;
            // A small gap between boxes, if there is room for it.
            let width = if width > 2.0 { width - 0.6 } else { width };
            let _ = write!(
                path,
                "M{:.1} {:.1}h{width:.1}v{height:.1}h-{width:.1}z",
                LEFT + span.start * scale,
                y + height * index as f64
            );
        }
    }
    path
}
