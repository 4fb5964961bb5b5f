//! How it looks: all jobs one below the other on a sheet as long as it takes, of which a terminal shows a part.

use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row, Table, Widget};
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

const NOTHING: &str = "no job of this user runs here: start one with `trainyard run`";
const KEYS: &str = "q leaves, arrows and pages scroll";

/// The sheet.
pub fn paint(jobs: &[JobView], width: u16) -> Buffer {
    let num_lines = jobs.iter().map(height).fold(0, u16::saturating_add);
    let area = Rect::new(0, 0, width, num_lines.max(1));
    let mut sheet = Buffer::empty(area);
    if jobs.is_empty() {
        Paragraph::new(NOTHING).render(area, &mut sheet);
    }
    let heights = jobs.iter().map(|job| Constraint::Length(height(job)));
    let areas = Layout::vertical(heights).split(area);
    for (job, area) in jobs.iter().zip(areas.iter()) {
        paint_job(job, *area, &mut sheet);
    }
    sheet
}

/// A sheet as text.
pub fn text(sheet: &Buffer) -> String {
    let (width, height) = (sheet.area.width, sheet.area.height);
    let line = |y: u16| -> String { (0..width).map(|x| sheet[(x, y)].symbol()).collect() };
    (0..height)
        .map(|y| format!("{}\n", line(y).trim_end()))
        .collect()
}

/// Shows the sheet from a line on, or from the last that leaves no empty screen below: it returns which.
pub fn draw(jobs: &[JobView], first_line: u16, frame: &mut Frame<'_>) -> u16 {
    let [shown, below] =
        Layout::vertical([Constraint::Min(0), Constraint::Length(1)]).areas(frame.area());
    let sheet = paint(jobs, shown.width);
    let first_line = first_line.min(sheet.area.height.saturating_sub(shown.height));
    for y in 0..shown.height.min(sheet.area.height - first_line) {
        for x in 0..shown.width {
            frame.buffer_mut()[(x, y)] = sheet[(x, first_line + y)].clone();
        }
    }
    frame.render_widget(Line::from(KEYS).dim(), below);
    first_line
}

/// A title, a header, the ranks, the faults, and an empty line.
fn height(job: &JobView) -> u16 {
    let lines = 3 + job.ranks.len() + faults(job).len();
    u16::try_from(lines).unwrap_or(u16::MAX)
}

fn paint_job(job: &JobView, area: Rect, sheet: &mut Buffer) {
    let faults = faults(job);
    let num_faults = u16::try_from(faults.len()).unwrap_or(u16::MAX);
    let [title, table, below, _] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(1),
        Constraint::Length(num_faults),
        Constraint::Length(1),
    ])
    .areas(area);
    Line::from(headline(job)).bold().render(title, sheet);
    let names = COLUMNS.map(|(name, _)| Cell::from(name));
    let widths = COLUMNS.map(|(_, width)| width);
    let ranks = Table::new(job.ranks.iter().map(row), widths);
    let header = Row::new(names).style(Style::new().dim());
    Widget::render(ranks.header(header), table, sheet);
    let faults: Vec<Line> = faults.into_iter().map(Line::from).collect();
    Paragraph::new(faults).red().render(below, sheet);
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
        Cell::from(or_none(rank.work_share.map(percent))),
        Cell::from(rank.whereabouts.clone()),
    ])
}

fn state(stage: Stage) -> Cell<'static> {
    match stage {
        Stage::Starting => Cell::from("starts").yellow(),
        Stage::Stepping => Cell::from("trains").green(),
        Stage::Between => Cell::from("pauses").cyan(),
        Stage::Ended => Cell::from("is done").dim(),
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
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

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
        assert_eq!(text(&paint(&[job], 108)), expected);
    }

    #[test]
    fn more_ranks_than_lines_are_scrolled_to_and_not_beyond() {
        let job = JobView {
            run_id: "llama7".into(),
            num_nodes: 1,
            world_size: 20,
            restarts: 0,
            max_restarts: 0,
            ranks: (0..20).map(|number| rank(number, "")).collect(),
            faults: Vec::new(),
        };
        let jobs = [job];
        let Ok(mut terminal) = Terminal::new(TestBackend::new(80, 6));
        let mut first_line = 3;
        let Ok(_) = terminal.draw(|frame| first_line = draw(&jobs, first_line, frame));
        assert_eq!(first_line, 3);
        let shown = text(terminal.backend().buffer());
        assert!(shown.starts_with("1     1    trains"), "{shown}");
        assert!(shown.ends_with(&format!("{KEYS}\n")), "{shown}");
        let Ok(_) = terminal.draw(|frame| first_line = draw(&jobs, 1000, frame));
        assert_eq!(first_line, 23 - 5);
    }

    #[test]
    fn without_a_job_there_is_a_hint() {
        assert_eq!(text(&paint(&[], 80)), format!("{NOTHING}\n"));
    }
}
