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
      "plan_moves(Tensor accept_index, Tensor query_start, int Q, Tensor slot_mapping, Tensor(a!) src, "
      "Tensor(b!) dst) -> ()");
  m.def("move_rows(Tensor(a!)[] views, Tensor table, Tensor src, Tensor dst) -> ()");
}

// torch.ops.load_library needs no Python module, but a wheel checker expects an abi3 module to have its
// entry.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
