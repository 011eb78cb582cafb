// The schemas of the `ddtree` ops and the module entry point. Every op writes into given tensors: fixed
// shapes, no allocation, no wait for the device, so each can be captured into a CUDA graph.
#include <Python.h>
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(ddtree, m) {
  m.def(
      "build(Tensor top_logps, Tensor top_tokens, Tensor budgets, Tensor(a!) tokens, Tensor(b!) parents, "
      "Tensor(c!) depths, Tensor(d!) node_logws, Tensor(e!) num_nodes) -> ()");
  m.def(
      "retrieve(Tensor parents, Tensor num_nodes, Tensor(a!) retrieve_index, Tensor(b!) retrieve_next_token, "
      "Tensor(c!) retrieve_next_sibling) -> ()");
  m.def("ancestor_mask(Tensor parents, Tensor num_nodes, Tensor(a!) mask) -> ()");
  m.def(
      "walk(Tensor candidates, Tensor retrieve_next_token, Tensor retrieve_next_sibling, Tensor num_nodes, "
      "Tensor target_tokens, Tensor(a!) predict, Tensor(b!) accept_index, Tensor(c!) accept_token_num) -> "
      "()");
  m.def(
      "walk_coins(Tensor candidates, Tensor retrieve_next_token, Tensor retrieve_next_sibling, "
      "Tensor num_nodes, Tensor target_probs, Tensor coins, Tensor final_coins, Tensor(a!) predict, "
      "Tensor(b!) accept_index, Tensor(c!) accept_token_num) -> ()");
  m.def(
      "walk_residual(Tensor candidates, Tensor retrieve_next_token, Tensor retrieve_next_sibling, "
      "Tensor num_nodes, Tensor target_probs, Tensor draft_probs, Tensor coins, Tensor final_coins, "
      "Tensor(a!) predict, Tensor(b!) accept_index, Tensor(c!) accept_token_num) -> ()");
  m.def(
      "plan_moves(Tensor accept_index, Tensor query_start, int Q, Tensor slot_mapping, Tensor(a!) src, "
      "Tensor(b!) dst) -> ()");
  m.def("move_rows(Tensor(a!)[] views, Tensor table, Tensor src, Tensor dst) -> ()");
  // A step's bookkeeping, CUDA only; elsewhere vllm_ddtree/step.py composes it from the ops above.
  m.def("top_logps(Tensor logits, Tensor(a!) logps, Tensor(b!) tokens) -> ()");
  m.def(
      "build_trees(Tensor top_logps, Tensor top_tokens, Tensor budgets, Tensor rows, Tensor is_chain, "
      "Tensor(a!) tokens, Tensor(b!) parents, Tensor(c!) depths, Tensor(d!) node_logws, "
      "Tensor(e!) num_nodes, Tensor(f!) next_token, Tensor(g!) next_sibling, Tensor(h!) mask, "
      "Tensor(i!) drafts) -> ()");
  m.def(
      "begin_step(Tensor states, Tensor query_start, Tensor cu_logits, Tensor computed, Tensor depths, "
      "Tensor mask, Tensor(a!) positions, Tensor(b!) local_pos, Tensor(c!) step_mask, "
      "Tensor(d!) tree_len) -> ()");
  m.def(
      "walk_rows(Tensor drawn, Tensor drafts, Tensor cu_logits, Tensor states, Tensor next_token, "
      "Tensor next_sibling, Tensor num_nodes, Tensor(a!) sampled, Tensor(b!) accept_index, "
      "Tensor(c!) num_sampled) -> ()");
  m.def(
      "commit_cache(Tensor table, int row_bytes, Tensor accept_index, Tensor query_start, int Q, "
      "Tensor slot_mapping) -> ()");
  m.def(
      "commit_rows(Tensor(a!)[] hidden, Tensor(b!) positions, Tensor accept_index, Tensor query_start, "
      "Tensor states, Tensor computed, int Q) -> ()");
}

// torch.ops.load_library needs no Python module, but a wheel checker expects an abi3 module to have its
// entry.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
