//! Common expert-parallel layouts: the experts and process groups of every rank. The book shows the same diagrams.

use trainyard_mesh::{Axis, Mesh, MeshDiagram, MeshError, Role};

type Groups = Vec<Vec<usize>>;

fn diagram(
    sizes: &[(Axis, usize)],
    ep: usize,
    experts: usize,
    sharded: bool,
) -> Result<MeshDiagram, MeshError> {
    Ok(MeshDiagram::new(
        Mesh::new(sizes)?.with_ep(ep)?,
        experts,
        sharded,
    ))
}

/// The groups of a role; none if the job does not have it.
fn groups(diagram: &MeshDiagram, wanted: Role) -> Groups {
    let mut roles = diagram.roles().into_iter();
    let found = roles.find(|(role, _)| *role == wanted);
    found.map_or(Groups::new(), |(_, groups)| groups)
}

/// The first and last expert of every rank.
fn experts(diagram: &MeshDiagram, num_ranks: usize) -> Result<Vec<(usize, usize)>, MeshError> {
    let of_rank = |rank| diagram.experts_of(rank).map(|own| (own.start, own.end - 1));
    (0..num_ranks).map(of_rank).collect()
}

/// Checks that the book shows this diagram verbatim.
fn assert_in_book(diagram: &MeshDiagram) {
    let drawing = diagram.to_string();
    println!("{drawing}");
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/experts.md");
    let page = std::fs::read_to_string(page).expect("the book's page on experts");
    assert!(
        page.contains(&drawing),
        "docs/src/experts.md does not show:\n{drawing}"
    );
}

#[test]
fn eight_experts_on_two_ranks_with_two_replicas() -> Result<(), MeshError> {
    let diagram = diagram(&[(Axis::DpShard, 4)], 2, 8, false)?;
    assert_eq!(experts(&diagram, 4)?, [(0, 3), (4, 7), (0, 3), (4, 7)]);
    assert_eq!(groups(&diagram, Role::ExpertDispatch), [[0, 1], [2, 3]]);
    assert_eq!(groups(&diagram, Role::ExpertGradients), [[0, 2], [1, 3]]);
    assert_eq!(groups(&diagram, Role::DenseGradients), [[0, 1, 2, 3]]);
    assert_eq!(groups(&diagram, Role::DenseStates), Groups::new());
    assert_in_book(&diagram);
    Ok(())
}

#[test]
fn four_experts_with_tensor_parallelism() -> Result<(), MeshError> {
    let diagram = diagram(&[(Axis::DpShard, 2), (Axis::Tp, 2)], 2, 4, false)?;
    assert_eq!(experts(&diagram, 4)?, [(0, 1), (2, 3), (0, 1), (2, 3)]);
    // Tensor-parallel ranks split the sequence between them, and each dispatches its own tokens.
    assert_eq!(groups(&diagram, Role::ExpertDispatch), [[0, 1], [2, 3]]);
    assert_eq!(groups(&diagram, Role::TensorParallel), [[0, 1], [2, 3]]);
    assert_eq!(groups(&diagram, Role::ExpertGradients), [[0, 2], [1, 3]]);
    assert_eq!(groups(&diagram, Role::DenseGradients), [[0, 2], [1, 3]]);
    assert_in_book(&diagram);
    Ok(())
}

#[test]
fn two_by_two_with_sharded_states() -> Result<(), MeshError> {
    let diagram = diagram(&[(Axis::DpShard, 4)], 2, 8, true)?;
    assert_eq!(experts(&diagram, 4)?, [(0, 3), (4, 7), (0, 3), (4, 7)]);
    assert_eq!(groups(&diagram, Role::ExpertStates), [[0, 2], [1, 3]]);
    assert_eq!(groups(&diagram, Role::DenseStates), [[0, 1, 2, 3]]);
    assert_in_book(&diagram);
    Ok(())
}

#[test]
fn eight_experts_over_four_ranks() -> Result<(), MeshError> {
    let diagram = diagram(&[(Axis::DpShard, 4)], 4, 8, false)?;
    assert_eq!(experts(&diagram, 4)?, [(0, 1), (2, 3), (4, 5), (6, 7)]);
    assert_eq!(groups(&diagram, Role::ExpertDispatch), [[0, 1, 2, 3]]);
    // Each expert is on one rank only, so its gradients need no reduction.
    assert_eq!(
        groups(&diagram, Role::ExpertGradients),
        [[0], [1], [2], [3]]
    );
    assert_eq!(groups(&diagram, Role::DenseGradients), [[0, 1, 2, 3]]);
    assert_in_book(&diagram);
    Ok(())
}

#[test]
fn eight_ranks_with_hybrid_sharding() -> Result<(), MeshError> {
    let sizes = [(Axis::DpReplicate, 2), (Axis::DpShard, 4)];
    let diagram = diagram(&sizes, 2, 8, true)?;
    assert_eq!(
        groups(&diagram, Role::ExpertDispatch),
        [[0, 1], [2, 3], [4, 5], [6, 7]]
    );
    assert_eq!(
        groups(&diagram, Role::ExpertGradients),
        [[0, 2, 4, 6], [1, 3, 5, 7]]
    );
    assert_eq!(
        groups(&diagram, Role::ExpertStates),
        [[0, 2], [1, 3], [4, 6], [5, 7]]
    );
    assert_eq!(
        groups(&diagram, Role::DenseStates),
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    );
    assert_in_book(&diagram);
    Ok(())
}

#[test]
fn large_meshes_are_abbreviated() -> Result<(), MeshError> {
    let sizes = [(Axis::Pp, 16), (Axis::DpShard, 128)];
    let drawing = diagram(&sizes, 64, 256, true)?.to_string();
    assert!(drawing.lines().count() < 60, "{drawing}");
    assert!(drawing.contains("... and 2016 more"), "{drawing}");
    assert!(drawing.contains("{0 1 .. 63}"), "{drawing}");
    assert!(drawing.contains("4 to 7"), "{drawing}");
    Ok(())
}

#[test]
fn a_dense_model_has_no_experts_in_its_diagram() -> Result<(), MeshError> {
    let drawing = diagram(&[(Axis::DpShard, 2)], 1, 0, true)?.to_string();
    assert!(!drawing.contains("expert"), "{drawing}");
    Ok(())
}
