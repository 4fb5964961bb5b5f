//! How it looks.

use ratatui::Frame;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row, Table};
use trainyard_trace::{Stage, readable_bytes};

use super::view::{JobView, RankView};

/// How many faults are shown, and how many lines of each.
const FAULTS: usize = 3;
const LINES: usize = 2;

const COLUMNS: [(&str, Constraint); 9] = [
    ("RANK", Constraint::Length(5)),
    ("NODE", Constraint::Length(4)),
    ("STATE", Constraint::Length(8)),
    ("STEP", Constraint::Length(13)),
    ("LOSS", Constraint::Length(9)),
    ("TOKENS/S", Constraint::Length(9)),
    ("MEMORY", Constraint::Length(10)),
    ("WORKS", Constraint::Length(5)),
    ("AT", Constraint::Min(10)),
];

/// All jobs, one below the other.
fn draw(jobs: &[JobView], frame: &mut Frame<'_>) {
    let area = frame.area();
    if jobs.is_empty() {
        frame.render_widget(Paragraph::new(NOTHING), area);
        return;
    }
    let heights = jobs.iter().map(|job| Constraint::Length(height(job)));
    for (job, area) in jobs
        .iter()
        .zip(Layout::vertical(heights).split(area).iter())
    {
        draw_job(job, frame, *area);
    }
}

const NOTHING: &str = "no job of this user runs here: start one with `trainyard run`";

/// The jobs as text.
pub fn text(jobs: &[JobView], width: u16) -> String {
    let height = jobs.iter().map(height).fold(0, u16::saturating_add).max(1);
    let Ok(mut terminal) = Terminal::new(TestBackend::new(width, height));
    let Ok(_) = terminal.draw(|frame| draw(jobs, frame));
    let buffer = terminal.backend().buffer();
    let line = |y: u16| -> String { (0..width).map(|x| buffer[(x, y)].symbol()).collect() };
    (0..height)
        .map(|y| format!("{}\n", line(y).trim_end()))
        .collect()
}

/// A title, a header, the ranks, the faults, and an empty line.
fn height(job: &JobView) -> u16 {
    let lines = 3 + job.ranks.len() + faults(job).len();
    u16::try_from(lines).unwrap_or(u16::MAX)
}

fn draw_job(job: &JobView, frame: &mut Frame<'_>, area: Rect) {
    let faults = faults(job);
    let num_faults = u16::try_from(faults.len()).unwrap_or(u16::MAX);
    let [title, table, below, _] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(1),
        Constraint::Length(num_faults),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(Line::from(headline(job)), title);
    let names = COLUMNS.map(|(name, _)| Cell::from(name));
    let header = Row::new(names);
    let rows = job.ranks.iter().map(row);
    let widths = COLUMNS.map(|(_, width)| width);
    frame.render_widget(Table::new(rows, widths).header(header), table);
    let faults: Vec<Line> = faults.into_iter().map(Line::from).collect();
    frame.render_widget(Paragraph::new(faults), below);
}

fn headline(job: &JobView) -> String {
    let plural = |number: usize, what: &str| match number {
        1 => format!("1 {what}"),
        number => format!("{number} {what}s"),
    };
    let mut text = format!(
        "{}: {}, {}",
        job.run_id,
        plural(job.num_nodes, "machine"),
        plural(job.world_size, "rank")
    );
    let speed: f64 = job
        .ranks
        .iter()
        .filter_map(|rank| rank.tokens_per_second)
        .sum();
    if speed > 0.0 {
        text += &format!(", {speed:.0} tokens/s");
    }
    if job.max_restarts > 0 || job.restarts > 0 {
        text += &format!(
            ", started again {} of {} times",
            job.restarts, job.max_restarts
        );
    }
    text
}

fn row(rank: &RankView) -> Row<'static> {
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let cells = [
        rank.rank.to_string(),
        rank.node.to_string(),
        state(rank.stage).to_owned(),
        format!("{}/{}", rank.step, rank.num_steps),
        or_none(rank.loss.map(|loss| format!("{loss:.5}"))),
        or_none(rank.tokens_per_second.map(|speed| format!("{speed:.0}"))),
        or_none(rank.memory_bytes.map(readable_bytes)),
        or_none(
            rank.work_share
                .map(|share| format!("{:.0} %", 100.0 * share)),
        ),
        rank.whereabouts.clone(),
    ];
    Row::new(cells)
}

fn state(stage: Stage) -> &'static str {
    match stage {
        Stage::Starting => "starts",
        Stage::Stepping => "trains",
        Stage::Between => "pauses",
        Stage::Ended => "is done",
    }
}

/// The first lines of the last faults.
fn faults(job: &JobView) -> Vec<String> {
    let first = job.faults.len().saturating_sub(FAULTS);
    let last = job.faults[first..].iter();
    last.flat_map(|fault| fault.lines().take(LINES))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: usize, whereabouts: &str) -> RankView {
        RankView {
            rank,
            node: rank,
            stage: Stage::Stepping,
            step: 120,
            num_steps: 1000,
            loss: (rank == 0).then_some(3.25),
            tokens_per_second: (rank == 0).then_some(1234.0),
            memory_bytes: (rank == 0).then_some(3 << 29),
            work_share: Some(0.97),
            whereabouts: whereabouts.to_owned(),
        }
    }

    #[test]
    fn a_job_its_ranks_and_its_faults() {
        let job = JobView {
            run_id: "llama7".into(),
            num_nodes: 2,
            world_size: 2,
            restarts: 1,
            max_restarts: 3,
            ranks: vec![
                rank(0, "in step 120, waiting in all_reduce 41 of dp_shard (gradient)"),
                rank(1, "in step 120"),
            ],
            faults: vec!["rank 1 (pid 7) was killed by SIGKILL, 9.1s after the start\n  it was in step 90\n  more".into()],
        };
        let expected = "\
llama7: 2 machines, 2 ranks, 1234 tokens/s, started again 1 of 3 times
RANK  NODE STATE    STEP          LOSS      TOKENS/S  MEMORY     WORKS AT
0     0    trains   120/1000      3.25000   1234      1.50 GiB   97 %  in step 120, waiting in all_reduce 41
1     1    trains   120/1000      -         -         -          97 %  in step 120
rank 1 (pid 7) was killed by SIGKILL, 9.1s after the start
  it was in step 90

";
        assert_eq!(text(&[job], 108), expected);
    }

    #[test]
    fn without_a_job_there_is_a_hint() {
        assert_eq!(text(&[], 80), format!("{NOTHING}\n"));
    }
}
