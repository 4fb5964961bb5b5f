//! Layouts of experts that people ask for, from the mesh: who has which experts, and who works together
//! on what. The book shows the same drawings.

use trainyard_mesh::{Axis, Chart, Mesh, MeshError, Role};

type Groups = Vec<Vec<usize>>;

fn chart(
    sizes: &[(Axis, usize)],
    ep: usize,
    experts: usize,
    sharded: bool,
) -> Result<Chart, MeshError> {
    Ok(Chart::new(Mesh::new(sizes)?.with_ep(ep)?, experts, sharded))
}

/// The groups of a role; none where nobody has it.
fn groups(chart: &Chart, wanted: Role) -> Groups {
    let mut roles = chart.roles().into_iter();
    let found = roles.find(|(role, _)| *role == wanted);
    found.map_or(Groups::new(), |(_, groups)| groups)
}

/// First and last expert of every rank.
fn experts(chart: &Chart, num_ranks: usize) -> Result<Vec<(usize, usize)>, MeshError> {
    let of_rank = |rank| chart.experts_of(rank).map(|own| (own.start, own.end - 1));
    (0..num_ranks).map(of_rank).collect()
}

/// The drawing, which must stand in the book as it is.
fn shown(chart: &Chart) {
    let drawing = chart.to_string();
    println!("{drawing}");
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/experts.md");
    let page = std::fs::read_to_string(page).expect("the book's page on experts");
    assert!(
        page.contains(&drawing),
        "docs/src/experts.md does not show:\n{drawing}"
    );
}

#[test]
fn eight_experts_on_two_ranks_and_copied_on_two_more() -> Result<(), MeshError> {
    let chart = chart(&[(Axis::DpShard, 4)], 2, 8, false)?;
    assert_eq!(experts(&chart, 4)?, [(0, 3), (4, 7), (0, 3), (4, 7)]);
    assert_eq!(groups(&chart, Role::RowsToExperts), [[0, 1], [2, 3]]);
    assert_eq!(groups(&chart, Role::ExpertGradients), [[0, 2], [1, 3]]);
    assert_eq!(groups(&chart, Role::OtherGradients), [[0, 1, 2, 3]]);
    assert_eq!(groups(&chart, Role::OtherStates), Groups::new());
    shown(&chart);
    Ok(())
}

#[test]
fn four_experts_beside_shared_matrices() -> Result<(), MeshError> {
    let chart = chart(&[(Axis::DpShard, 2), (Axis::Tp, 2)], 2, 4, false)?;
    assert_eq!(experts(&chart, 4)?, [(0, 1), (2, 3), (0, 1), (2, 3)]);
    // The ranks that share matrices divide positions between them, and each sends its own.
    assert_eq!(groups(&chart, Role::RowsToExperts), [[0, 1], [2, 3]]);
    assert_eq!(groups(&chart, Role::Matrices), [[0, 1], [2, 3]]);
    assert_eq!(groups(&chart, Role::ExpertGradients), [[0, 2], [1, 3]]);
    assert_eq!(groups(&chart, Role::OtherGradients), [[0, 2], [1, 3]]);
    shown(&chart);
    Ok(())
}

#[test]
fn two_by_two_with_sharded_states() -> Result<(), MeshError> {
    let chart = chart(&[(Axis::DpShard, 4)], 2, 8, true)?;
    assert_eq!(experts(&chart, 4)?, [(0, 3), (4, 7), (0, 3), (4, 7)]);
    assert_eq!(groups(&chart, Role::ExpertStates), [[0, 2], [1, 3]]);
    assert_eq!(groups(&chart, Role::OtherStates), [[0, 1, 2, 3]]);
    shown(&chart);
    Ok(())
}

#[test]
fn eight_experts_over_four_ranks() -> Result<(), MeshError> {
    let chart = chart(&[(Axis::DpShard, 4)], 4, 8, false)?;
    assert_eq!(experts(&chart, 4)?, [(0, 1), (2, 3), (4, 5), (6, 7)]);
    assert_eq!(groups(&chart, Role::RowsToExperts), [[0, 1, 2, 3]]);
    // Nobody else has a rank's experts, so their gradients stay where they are.
    assert_eq!(groups(&chart, Role::ExpertGradients), [[0], [1], [2], [3]]);
    assert_eq!(groups(&chart, Role::OtherGradients), [[0, 1, 2, 3]]);
    shown(&chart);
    Ok(())
}

#[test]
fn eight_ranks_in_copies_of_shards() -> Result<(), MeshError> {
    let sizes = [(Axis::DpReplicate, 2), (Axis::DpShard, 4)];
    let chart = chart(&sizes, 2, 8, true)?;
    assert_eq!(
        groups(&chart, Role::RowsToExperts),
        [[0, 1], [2, 3], [4, 5], [6, 7]]
    );
    assert_eq!(
        groups(&chart, Role::ExpertGradients),
        [[0, 2, 4, 6], [1, 3, 5, 7]]
    );
    assert_eq!(
        groups(&chart, Role::ExpertStates),
        [[0, 2], [1, 3], [4, 6], [5, 7]]
    );
    assert_eq!(
        groups(&chart, Role::OtherStates),
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    );
    shown(&chart);
    Ok(())
}

#[test]
fn large_meshes_are_drawn_in_part() -> Result<(), MeshError> {
    let sizes = [(Axis::Pp, 16), (Axis::DpShard, 128)];
    let drawing = chart(&sizes, 64, 256, true)?.to_string();
    assert!(drawing.lines().count() < 60, "{drawing}");
    assert!(drawing.contains("... and 2016 more"), "{drawing}");
    assert!(drawing.contains("{0 1 .. 63}"), "{drawing}");
    assert!(drawing.contains("4 to 7"), "{drawing}");
    Ok(())
}

#[test]
fn a_model_without_experts_has_none_drawn() -> Result<(), MeshError> {
    let drawing = chart(&[(Axis::DpShard, 2)], 1, 0, true)?.to_string();
    assert!(!drawing.contains("expert"), "{drawing}");
    Ok(())
}
