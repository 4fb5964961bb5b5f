//! When every rank of the pipeline does what.
//!
//! A rank's boxes of one colour are one path, so that thousands of them stay small.

use std::fmt::Write;

use trainyard_schedule::{Action, Span, Work};

use super::{legend, seconds, section};
use crate::{Plan, Question, timeline};

const WIDTH: f64 = 1000.0;
const LEFT: f64 = 62.0;
const ROW: f64 = 18.0;
/// More ranks than this are shown as every so many.
const MOST_RANKS: usize = 16;

const COLOURS: [(&str, &str, Work); 4] = [
    ("c1", "forward", Work::Forward),
    ("c7", "backward", Work::Backward),
    ("c2", "backward, input", Work::BackwardInput),
    ("c4", "backward, weights", Work::BackwardWeight),
];

pub(super) fn draw(page: &mut String, question: &Question, plan: &Plan) {
    let strategy = &plan.strategy;
    let timeline = timeline(
        &question.shape,
        strategy,
        &question.cluster,
        &question.calibration,
    );
    let Ok(timeline) = timeline else { return };
    let end = timeline.end().max(f64::MIN_POSITIVE);
    let every = strategy.degrees.pp.div_ceil(MOST_RANKS);
    let shown: Vec<usize> = (0..timeline.ranks.len()).step_by(every).collect();
    let mut what = format!(
        "{}: {} micro-batches through {} stages on {} ranks; gaps are waiting.",
        strategy.layers,
        strategy.num_microbatches(),
        strategy.num_stages(),
        strategy.degrees.pp
    );
    if every > 1 {
        let _ = write!(what, " One rank of every {every} is shown.");
    }
    section(page, "The pipeline", &what);
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
        for (colour, _, work) in COLOURS {
            let path = path(&timeline.ranks[rank], work, y, (WIDTH - LEFT) / end);
            if !path.is_empty() {
                let _ = writeln!(page, "<path fill=\"var(--{colour})\" d=\"{path}\"/>");
            }
        }
    }
    let y = height - 6.0;
    let _ = writeln!(
        page,
        "<text x=\"{LEFT}\" y=\"{y}\">0</text><text x=\"{WIDTH}\" y=\"{y}\" text-anchor=\"end\">{}</text></svg>",
        seconds(end)
    );
    let used = COLOURS.iter().filter(|(_, _, work)| {
        let spans = timeline.ranks.iter().flatten();
        spans.flat_map(works).any(|found| found == *work)
    });
    let used: Vec<(&str, &str)> = used.map(|(colour, name, _)| (*colour, *name)).collect();
    legend(page, &used);
    page.push_str("</div>\n");
}

fn works(span: &Span) -> Vec<Work> {
    match span.action {
        Action::One(task) => vec![task.work],
        Action::Both(first, second) => vec![first.work, second.work],
    }
}

/// Boxes of one kind of work. Of two at once each has half of the row.
fn path(spans: &[Span], work: Work, y: f64, scale: f64) -> String {
    let mut path = String::new();
    for span in spans {
        let works = works(span);
        let part = (ROW - 3.0) / works.len() as f64;
        for (index, _) in works
            .iter()
            .enumerate()
            .filter(|(_, found)| **found == work)
        {
            let width = (span.end - span.start) * scale;
            // A hair's breadth between boxes, where there is room for it.
            let width = if width > 2.0 { width - 0.6 } else { width };
            let _ = write!(
                path,
                "M{:.1} {:.1}h{width:.1}v{part:.1}h-{width:.1}z",
                LEFT + span.start * scale,
                y + part * index as f64
            );
        }
    }
    path
}
