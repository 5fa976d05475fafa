// The comparison of two pictures of a view with a divider that follows the pointer.
"use strict";document.querySelectorAll('.hero').forEach(function(hero){
  var compare=hero.querySelector('.compare'),over=compare.querySelector('.over img'),
      under=compare.querySelector('.under img'),left=compare.querySelector('.l'),right=compare.querySelector('.r'),
      range=compare.querySelector('input'),views=hero.querySelectorAll('.thumbs button'),
      modes=hero.querySelectorAll('.modes button'),view='0',mode=modes[0];
  function picture(name){return document.querySelector('[data-picture="'+view+'-'+name+'"]')}
  function press(all,one){all.forEach(function(b){b.setAttribute('aria-pressed',b===one)})}
  function show(){
    var a=picture(mode.dataset.left),b=picture(mode.dataset.right);
    if(a)over.src=a.src;if(b)under.src=b.src;
    left.textContent=mode.dataset.leftName;right.textContent=mode.dataset.rightName;
  }
  range.addEventListener('input',function(){compare.style.setProperty('--cut',range.value+'%')});
  compare.addEventListener('pointermove',function(e){
    if(e.pointerType!=='mouse')return;var box=compare.getBoundingClientRect();
    range.value=100*(e.clientX-box.left)/box.width;compare.style.setProperty('--cut',range.value+'%');
  });
  views.forEach(function(b){b.addEventListener('click',function(){view=b.dataset.view;press(views,b);show()})});
  modes.forEach(function(b){b.addEventListener('click',function(){mode=b;press(modes,b);show()})});
});
