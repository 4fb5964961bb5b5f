//! The layout: all jobs below each other on one long canvas, of which the terminal shows a part.

use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row, Table, Widget};
use trainyard_heartbeat::Stage;
use trainyard_trace::{counted, readable_bytes};

use super::view::{JobView, RankView, Snapshot};

/// How many faults are shown, and how many lines of each.
const MAX_FAULTS: usize = 3;
const LINES: usize = 2;

const COLUMNS: [(&str, Constraint); 9] = [
    ("RANK", Constraint::Length(5)),
    ("NODE", Constraint::Length(4)),
    ("STATE", Constraint::Length(9)),
    ("STEP", Constraint::Length(13)),
    ("LOSS", Constraint::Length(9)),
    ("TOKENS/S", Constraint::Length(9)),
    ("MEMORY", Constraint::Length(10)),
    ("BUSY", Constraint::Length(5)),
    ("POSITION", Constraint::Min(10)),
];

const NO_JOBS: &str = "this user has no jobs on this node: start one with `trainyard run`";
const KEYS: &str = "q: quit, arrows and page keys: scroll";

/// The width at which no position is cut off.
pub fn width(snapshot: &Snapshot) -> u16 {
    let fixed = COLUMNS.iter().map(|(_, width)| match width {
        Constraint::Length(width) => width + 1,
        _ => 0,
    });
    let ranks = snapshot.jobs.iter().flat_map(|job| &job.ranks);
    let longest = ranks.map(|rank| rank.position.chars().count()).max();
    let longest = u16::try_from(longest.unwrap_or(0)).unwrap_or(u16::MAX);
    let message = u16::try_from(nothing(&snapshot.others).chars().count()).unwrap_or(u16::MAX);
    fixed.sum::<u16>().saturating_add(longest).max(message)
}

/// What is shown instead of jobs.
fn nothing(others: &[String]) -> String {
    match others {
        [] => NO_JOBS.to_owned(),
        others => format!(
            "there is no such job; on this node run {}",
            others.join(", ")
        ),
    }
}

/// Draws all jobs on a canvas of this width.
pub fn paint(snapshot: &Snapshot, width: u16) -> Buffer {
    let jobs = &snapshot.jobs;
    let num_lines = jobs.iter().map(height).fold(0, u16::saturating_add);
    let area = Rect::new(0, 0, width, num_lines.max(1));
    let mut canvas = Buffer::empty(area);
    if jobs.is_empty() {
        Paragraph::new(nothing(&snapshot.others)).render(area, &mut canvas);
    }
    let heights = jobs.iter().map(|job| Constraint::Length(height(job)));
    let areas = Layout::vertical(heights).split(area);
    for (job, area) in jobs.iter().zip(areas.iter()) {
        paint_job(job, *area, &mut canvas);
    }
    canvas
}

/// A canvas as plain text.
pub fn text(canvas: &Buffer) -> String {
    let (width, height) = (canvas.area.width, canvas.area.height);
    let line = |y: u16| -> String { (0..width).map(|x| canvas[(x, y)].symbol()).collect() };
    (0..height)
        .map(|y| format!("{}\n", line(y).trim_end()))
        .collect()
}

/// Draws the part of the canvas from `first_line`, at most so far down that the screen stays full; returns the first
/// line that is shown.
pub fn draw(snapshot: &Snapshot, first_line: u16, frame: &mut Frame<'_>) -> u16 {
    let [shown, below] =
        Layout::vertical([Constraint::Min(0), Constraint::Length(1)]).areas(frame.area());
    let canvas = paint(snapshot, shown.width);
    let first_line = first_line.min(canvas.area.height.saturating_sub(shown.height));
    for y in 0..shown.height.min(canvas.area.height - first_line) {
        for x in 0..shown.width {
            frame.buffer_mut()[(x, y)] = canvas[(x, first_line + y)].clone();
        }
    }
    frame.render_widget(Line::from(KEYS).dim(), below);
    first_line
}

/// The height of a job: a title, a header, the ranks, the faults and an empty line.
fn height(job: &JobView) -> u16 {
    let lines = 3 + job.ranks.len() + faults(job).len();
    u16::try_from(lines).unwrap_or(u16::MAX)
}

fn paint_job(job: &JobView, area: Rect, canvas: &mut Buffer) {
    let faults = faults(job);
    let num_faults = u16::try_from(faults.len()).unwrap_or(u16::MAX);
    let [title, table, below, _] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(1),
        Constraint::Length(num_faults),
        Constraint::Length(1),
    ])
    .areas(area);
    Line::from(headline(job)).bold().render(title, canvas);
    let names = COLUMNS.map(|(name, _)| Cell::from(name));
    let widths = COLUMNS.map(|(_, width)| width);
    let ranks = Table::new(job.ranks.iter().map(row), widths);
    let header = Row::new(names).style(Style::new().dim());
    Widget::render(ranks.header(header), table, canvas);
    let faults: Vec<Line> = faults.into_iter().map(Line::from).collect();
    Paragraph::new(faults).red().render(below, canvas);
}

fn headline(job: &JobView) -> String {
    let mut text = format!(
        "{}: {}, {}",
        job.run_id,
        counted(job.num_nodes as u64, "node"),
        counted(job.world_size as u64, "rank")
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
        text += &format!(", {} of {} restarts used", job.restarts, job.max_restarts);
    }
    text
}

fn row(rank: &RankView) -> Row<'static> {
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    Row::new([
        Cell::from(rank.rank.to_string()),
        Cell::from(rank.node.to_string()),
        state(rank.stage),
        Cell::from(format!("{}/{}", rank.step, rank.num_steps)),
        Cell::from(or_none(rank.loss.map(|loss| format!("{loss:.5}")))),
        Cell::from(or_none(
            rank.tokens_per_second.map(|speed| format!("{speed:.0}")),
        )),
        Cell::from(or_none(rank.memory_bytes.map(readable_bytes))),
        Cell::from(or_none(rank.busy_fraction.map(percent))),
        Cell::from(rank.position.clone()),
    ])
}

fn state(stage: Stage) -> Cell<'static> {
    match stage {
        Stage::Starting => Cell::from("starting").yellow(),
        Stage::Stepping | Stage::Observed => Cell::from("training").green(),
        Stage::Between => Cell::from("save/eval").cyan(),
        Stage::Ended => Cell::from("finished").dim(),
    }
}

/// The first lines of the last faults.
fn faults(job: &JobView) -> Vec<String> {
    let first = job.faults.len().saturating_sub(MAX_FAULTS);
    let last = job.faults[first..].iter();
    last.flat_map(|fault| fault.lines().take(LINES))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn rank(rank: usize, position: &str) -> RankView {
        RankView {
            rank,
            node: rank,
            stage: Stage::Stepping,
            step: 120,
            num_steps: 1000,
            loss: (rank == 0).then_some(3.25),
            tokens_per_second: (rank == 0).then_some(1234.0),
            memory_bytes: (rank == 0).then_some(3 << 29),
            busy_fraction: Some(0.97),
            position: position.to_owned(),
        }
    }

    fn of(job: JobView) -> Snapshot {
        Snapshot {
            jobs: vec![job],
            others: Vec::new(),
        }
    }

    #[test]
    fn a_job_is_shown_with_its_ranks_and_faults() {
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
llama7: 2 nodes, 2 ranks, 1234 tokens/s, 1 of 3 restarts used
RANK  NODE STATE     STEP          LOSS      TOKENS/S  MEMORY     BUSY  POSITION
0     0    training  120/1000      3.25000   1234      1.50 GiB   97 %  in step 120, waiting in all_reduce 41
1     1    training  120/1000      -         -         -          97 %  in step 120
rank 1 (pid 7) was killed by SIGKILL, 9.1s after the start
  it was in step 90

";
        let snapshot = of(job);
        assert_eq!(text(&paint(&snapshot, 109)), expected);
        let whole = text(&paint(&snapshot, width(&snapshot)));
        assert!(
            whole.contains("all_reduce 41 of dp_shard (gradient)\n"),
            "{whole}"
        );
    }

    #[test]
    fn scrolling_stops_at_the_last_rank() {
        let job = JobView {
            run_id: "llama7".into(),
            num_nodes: 1,
            world_size: 20,
            restarts: 0,
            max_restarts: 0,
            ranks: (0..20).map(|number| rank(number, "")).collect(),
            faults: Vec::new(),
        };
        let snapshot = of(job);
        let Ok(mut terminal) = Terminal::new(TestBackend::new(80, 6));
        let mut first_line = 3;
        let Ok(_) = terminal.draw(|frame| first_line = draw(&snapshot, first_line, frame));
        assert_eq!(first_line, 3);
        let shown = text(terminal.backend().buffer());
        assert!(shown.starts_with("1     1    training"), "{shown}");
        assert!(shown.ends_with(&format!("{KEYS}\n")), "{shown}");
        let Ok(_) = terminal.draw(|frame| first_line = draw(&snapshot, 1000, frame));
        assert_eq!(first_line, 23 - 5);
    }

    #[test]
    fn without_jobs_a_hint_is_shown() {
        let none = Snapshot::default();
        assert_eq!(text(&paint(&none, 80)), format!("{NO_JOBS}\n"));
    }

    #[test]
    fn a_wrong_name_gets_those_of_jobs_that_run() {
        let others = Snapshot {
            others: vec!["llama7".into(), "none".into()],
            ..Snapshot::default()
        };
        let expected = "there is no such job; on this node run llama7, none\n";
        assert_eq!(text(&paint(&others, 80)), expected);
    }
}
